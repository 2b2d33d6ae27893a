"""Which tests run: the sizes of the suite, and that it is the CPU's on a machine with a GPU."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Interpreted kernels, amp's casts and flags, an optimizer's list: what was red where a GPU is.
ON_ANY_MACHINE = ["tests/ops/test_swiglu.py", "tests/amp/scaling/test_scaler.py", "tests/mlp"]
HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TRITON_INTERPRET")

SUITE = """
import pytest

@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", ["x", "y", pytest.param("z", marks=pytest.mark.exhaustive)])
def test_cases(a, b):
    pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_slow_case(a):
    pass

@pytest.mark.slow
@pytest.mark.parametrize("a", [1, 2])
def test_slow(a):
    pass

@pytest.mark.exhaustive
@pytest.mark.parametrize("a", [1, 2])
def test_matrix(a):
    pass

def test_one():
    pass

@pytest.mark.gpu
def test_gpu():
    pass
"""
QUICK = ["cases[x-1]", "cases[x-2]", "cases[y-1]", "slow_case[1]", "slow_case[3]", "one", "gpu"]
REST = ["cases[y-2]", "slow_case[2]", "slow[1]", "slow[2]"]
MATRICES = ["cases[z-1]", "cases[z-2]", "matrix[1]", "matrix[2]"]


SIZES = {
    "": QUICK,
    "--full": QUICK + REST,
    "--rest": REST,
    "--all": QUICK + REST + MATRICES,
    "--rest --all": REST + MATRICES,
    "--device cpu": QUICK,
    "--device cpu -m gpu": ["gpu"],
    "tests/one": QUICK + REST,
    "--quick tests/one": QUICK,
    "-k slow": ["slow_case[1]", "slow_case[3]", "slow_case[2]", "slow[1]", "slow[2]"],
    "-m slow": REST[1:],
}
COLLECT = """
import contextlib, io, json, re, sys
import pytest

found = {}
for words in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "-n0", *words.split()])
    found[words] = re.findall(r"^(\\S+)::test_(\\S+)$", out.getvalue(), re.MULTILINE)
print(json.dumps(found))
"""


def _run(folder, *words):
    """Run Python as a shell would that never heard of this suite."""
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_sizes(tmp_path):
    """Of a small suite with this one's conftest."""
    for name in ("one", "contrib"):
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / f"test_{name}.py").write_text(SUITE)
    (tmp_path / "tests/conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntestpaths = tests\nmarkers =\n  slow\n  exhaustive\n  gpu\n  dist\n"
    )
    done = _run(tmp_path, "-c", COLLECT, *SIZES)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    of_one = {
        words: [test for file, test in pairs if file == "tests/one/test_one.py"]
        for words, pairs in found.items()
    }
    assert {words: sorted(tests) for words, tests in of_one.items()} == {
        words: sorted(tests) for words, tests in SIZES.items()
    }
    long_tail = [test for file, test in found[""] if file.startswith("tests/contrib/")]
    assert long_tail == ["cases[x-1]", "slow_case[1]", "one", "gpu"]  # one case of a function
    # In a process of xdist, too, which parses the arguments itself.
    done = _run(tmp_path, "-m", "pytest", "-q", "-n1", "--rest", "-p", "no:cacheprovider")
    assert f"{len(REST) + len(QUICK + REST) - len(long_tail)} passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_the_suite_is_the_cpus_where_there_is_a_gpu():
    words = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-p", "tests.fake_gpu")
    done = _run(ROOT, *words, *ON_ANY_MACHINE)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50
