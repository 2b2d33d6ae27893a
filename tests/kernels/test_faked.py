"""On a GPU nothing is uploaded from pageable memory, nothing waits, and guards are right.

See fake_cuda.py (how that is known without a GPU) and faked.py (what is run, and how often).
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")
if sys.platform != "linux":
    pytest.skip("needs libc10.so", allow_module_level=True)

from tests.kernels import faked as program

# 148 kernels of 124 operations are compiled, once for all processes, half of the way: half of the
# 30 s. The rest is 60,000 operations on fake tensors.
pytestmark = pytest.mark.slow

PROGRAM = pathlib.Path(__file__).with_name("faked.py")
ROOT = PROGRAM.parents[2]


LAUNCHES = {name: launches for name, launches, _ in program.cases()}


def ran(names):
    """Run cases in a child process; after an abort, the rest in another one."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(ROOT)])
    left, found = list(names), {}
    while left:
        done = subprocess.run(
            [sys.executable, "-W", "error", str(PROGRAM), *left],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        found |= {line["case"]: line["found"] for line in lines if "case" in line}
        started = [line["start"] for line in lines if "start" in line]
        assert started, done.stderr
        left = left[left.index(started[-1]) + 1 :]
        if done.returncode:
            found[started[-1]] = f"aborted with {done.returncode}: {done.stderr}"
    return found


@pytest.fixture(scope="session")
def faked(once):
    """What was noted of every case."""
    return once("faked", lambda: ran([*LAUNCHES, *PLANTED]))


def calls(found):
    """(device number, name of the call, what was noted)."""
    assert not isinstance(found, str), found
    return [
        (number, name, noted)
        for number, by_call in enumerate(found)
        for name, noted in by_call.items()
    ]


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_have_their_guards_and_nothing_waits(name, faked):
    for number, call, noted in calls(faked[name]):
        assert (noted["error"], noted["waits"], noted["freed"]) == ("", [], 0), (number, call)
        assert len(noted["launches"]) == LAUNCHES[name], (number, call)
        wrong = [launch for launch in noted["launches"] if not guarded(*launch)]
        assert wrong == [], (number, call)
        if "devices" not in name:
            assert {launch[2] for launch in noted["launches"]} <= {f"cuda:{number}"}


def guarded(kernel, tensors, current, stream):
    """Whether a launch is on the device of its tensors and on the current stream there."""
    return tensors == [current] and stream == 0x1000 * (int(current[-1]) + 1)


@pytest.mark.parametrize("name", LAUNCHES)
def test_nothing_is_uploaded_from_pageable_memory(name, faked):
    assert {
        call: noted["uploads"] for _, call, noted in calls(faked[name]) if noted["uploads"]
    } == {}


# -- what is planted -----------------------------------------------------------------------------

PLANTED = {
    "planted: a list": ("uploads", "(2,) of torch.float32 to cuda:1"),
    "planted: a number": ("uploads", "() of torch.bool to cuda:1"),
    "planted: pageable": ("uploads", "(3,) of torch.float32 to cuda:1"),
    "planted: copy_": ("uploads", "(4,) of torch.float32 to cuda:1"),
    "planted: index": ("uploads", "(2,) of torch.int64 to cuda:1"),
    "planted: CPU index": ("uploads", "aten.index.Tensor with an index or a value on the CPU"),
    "planted: element": ("uploads", "() of torch.float32 to cuda:1"),
    "planted: item": ("waits", "aten._local_scalar_dense.default reads a tensor of the device"),
    "planted: bool": ("waits", "aten._local_scalar_dense.default reads a tensor of the device"),
    "planted: nonzero": ("waits", "aten.nonzero.default reads a tensor of the device"),
    "planted: cpu": ("waits", "a copy of (4,) to the CPU"),
    "planted: pinned": ("waits", "a blocking copy of (3,) to cuda:1"),
    "planted: freed": ("freed", 1),
    "planted: no guard": ("launches", ["copied", ["cuda:1"], "cuda:0", 0x1000]),
    "planted: grid": ("error", "grid (1, 65536, 1), allowed is (2147483647, 65535, 65535)"),
    "planted: block": ("error", "threads, Required: 2048, Hardware limit: 1024"),
    "planted: shared memory": ("error", "shared memory, Required: 262144, Hardware limit: 232448"),
    "planted: abort": ("", ""),
    "planted: nothing": ("", ""),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name, faked):
    kind, word = PLANTED[name]
    if name == "planted: abort":
        assert faked[name].startswith("aborted with -6")
        return
    for number, call, noted in calls(faked[name]):
        if kind == "error":
            assert word in noted["error"], (number, call)
            continue
        found = {key: noted[key] for key in ("uploads", "waits", "launches", "freed") if noted[key]}
        if kind == "freed" and "captured" not in call:
            assert found == {}
        elif number == 1:
            assert found == ({kind: word if kind == "freed" else [word]} if kind else {})
            assert kind != "launches" or not guarded(*word)
