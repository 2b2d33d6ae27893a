"""``--device``: what runs where, whose random numbers, and what is restored."""

import re

import pytest
import torch

from tests.on_device import DRAWN, DRAWN_LIKE, IN_PLACE, OF_THE_CPU, OnDevice
from tests.test_sizes import ROOT, _run

SUITE = """
import os, subprocess, sys, warnings
import pytest, torch



def default():
    return str(torch.utils._device.CURRENT_DEVICE)  # get_default_device makes a tensor there


AT_IMPORT = default()
NAMES = ["CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET"]
CHILD = f"import os; print(*map(os.environ.get, {NAMES}))"
modes = ["default"]


torch.cuda.is_initialized = lambda: True
torch.cuda.set_sync_debug_mode = modes.append


def child():
    return subprocess.check_output([sys.executable, "-c", CHILD], text=True).split(" ")


def test_on_the_device():
    assert AT_IMPORT == default() == "cuda"
    assert child() == ["", "1\\n"]
    torch.cuda.set_sync_debug_mode("error")
    warnings.warn("Synchronization debug mode is a prototype feature")


def test_the_mode_has_ended():
    assert modes[-1] == "default"


@pytest.mark.gpu
def test_as_it_is():
    assert default() == "None"
    assert child() == ["None", "None\\n"]
    assert torch.autocast("cpu", enabled=False).device == "cpu"


def test_cpu_means_the_device():
    assert torch.autocast("cpu", enabled=False).device == "cuda"
    assert torch.autocast(device_type="cpu", enabled=False).device == "cuda"
    assert torch.amp.GradScaler("cpu", enabled=False)._device == "cuda"
    assert torch.amp.GradScaler(enabled=False)._device == "cuda"


@pytest.mark.dist
def test_of_ranks():
    raise AssertionError("runs on the CPU only")
"""
ARGUMENTS = {
    "rand": (3,), "randn": (3, 4), "randint": (9, (3,)), "randperm": (5,),
    "normal": (0.0, 1.0, (3,)), "bernoulli": (torch.full((5,), 0.5),),
    "multinomial": (torch.ones(5), 2), "randint_like": (torch.ones(3), 9),
    "bernoulli_": (0.5,), "random_": (9,),
}  # fmt: skip


@pytest.fixture
def elsewhere():
    """A plugin whose device is no CPU, and has no generator of its own."""
    plugin = OnDevice("meta", {})
    torch.set_default_device("meta")
    yield plugin
    torch.set_default_device(None)


def _state_after(draw):
    torch.manual_seed(0)
    found = draw()
    return torch.get_rng_state(), found


@pytest.mark.parametrize("name", DRAWN + DRAWN_LIKE)
def test_numbers_are_drawn_on_the_cpu(name, elsewhere):
    """As many of the same generator as without a device; the result is on the device."""
    real = getattr(torch, name)
    arguments = ARGUMENTS.get(name, (torch.ones(3, device="cpu"),))
    options = {} if name not in DRAWN else {"generator": torch.default_generator}
    torch.set_default_device(None)
    expected, there = _state_after(lambda: real(*arguments))
    torch.set_default_device("meta")
    for given in ({}, options):
        state, found = _state_after(
            lambda given=given: elsewhere.drawn(real, name in DRAWN)(*arguments, **given)
        )
        assert torch.equal(state, expected)
        assert (found.device.type, found.shape, found.dtype) == ("meta", there.shape, there.dtype)
    elsewhere.active = False
    if name in ("rand", "randn"):
        assert not torch.equal(_state_after(lambda: real(*arguments))[0], expected)


@pytest.mark.parametrize("name", IN_PLACE)
def test_weights_are_drawn_on_the_cpu(name, elsewhere):
    real, arguments = getattr(torch.Tensor, name), ARGUMENTS.get(name, ())
    expected, _ = _state_after(lambda: real(torch.empty(20, device="cpu"), *arguments))
    weight = torch.empty(20)
    state, found = _state_after(lambda: elsewhere.drawn_in_place(real)(weight, *arguments))
    assert torch.equal(state, expected)
    assert found is weight


def test_what_does_not_run_elsewhere_is_there():
    """A file that is moved, or a test that is renamed, would run on the GPU."""
    for name in OF_THE_CPU:
        file, _, test = name.partition("::")
        assert [*ROOT.glob(f"{file.rstrip('/')}*")], name
        assert f"def {test}(" in (ROOT / file).read_text() if test else True, name


def test_waits_are_refused_in_one_place():
    """torch warns of the mode, and what leaves it on fails every later test.

    The place is ``apex.commands.selftest.gpu.waits_refused``.
    """
    word, asking = "set_sync_debug" + "_mode", []
    for folder in ("tests", "tools", "src"):
        for file in (ROOT / folder).rglob("*.py"):
            if f'{word}("error")' in file.read_text("utf-8"):
                asking.append(file.relative_to(ROOT).as_posix())
    assert sorted(asking) == ["src/apex/commands/selftest/gpu.py", "tests/test_on_device.py"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["-n0", "-n1"])
def test_a_suite_on_a_gpu_that_is_faked(tmp_path, processes):
    (tmp_path / "tests/one").mkdir(parents=True)
    (tmp_path / "tests/one/test_it.py").write_text(SUITE)
    (tmp_path / "tests/conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    lines = "[pytest]\nfilterwarnings = error\nmarkers =\n  slow\n  exhaustive\n  gpu\n  dist\n"
    (tmp_path / "pytest.ini").write_text(lines)
    words = ("-q", processes, "-p", "no:cacheprovider", "-p", "tests.fake_gpu", "--device", "cuda")
    done = _run(tmp_path, "-m", "pytest", *words, "tests/one/test_it.py")
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b4 passed\b", done.stdout)
