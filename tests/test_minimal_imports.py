"""Every module of apex imports where torch is alone: Windows, macOS, minimal builds."""

import json
import pathlib
import subprocess
import sys

import apex
from apex.bench import cli

TESTS = pathlib.Path(__file__).parent

# room -> what its modules may need, by design; test_info_needs_torch_alone guards `apex info`
NEEDS = {"apex.bench.": {"matplotlib", "numpy", "rich", "sklearn"}, "apex.kernels.": {"triton"}}

PREPARE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import minimal
minimal.become_minimal()
"""


def _run(program):
    done = subprocess.run(
        # The warning is torch's own, about the NumPy that is not there.
        [sys.executable, "-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
        + ["-c", PREPARE + program],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_every_module_imports():
    code, out, errors = _run(
        f"""
import importlib, pkgutil
import apex
names = [m.name for m in pkgutil.walk_packages(apex.__path__, "apex.")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        allowed = [needs for room, needs in {NEEDS!r}.items() if name.startswith(room)]
        assert any(missing in needs for needs in allowed), (name, error)
print(len(names))
"""
    )
    assert code == 0, errors
    assert int(out) > 5  # the walk went into the packages


def test_the_machine_is_minimal():
    """The probe itself: without this, the test above could pass because nothing was blocked."""
    code, out, errors = _run(
        """
for name in ("triton", "numpy", "fcntl", "resource", "rich", "torch.distributed"):
    try:
        exec(f"import {name}", {"__name__": "apex.probe"})
    except ModuleNotFoundError as error:
        print(name, error)
"""
    )
    assert (code, errors) == (0, "")
    blocked = ("triton", "numpy", "fcntl", "resource", "rich")
    *modules, distributed = out.splitlines()
    assert modules == [f"{name} No module named {name!r}" for name in blocked]
    assert distributed.startswith("torch.distributed apex.probe imports")


def test_info_needs_torch_alone():
    code, out, errors = _run(
        "from apex.bench.cli import main; raise SystemExit(main(['info', '--json']))"
    )
    assert (code, errors) == (0, "")
    assert json.loads(out)["versions"]["apex"] == apex.__version__


def test_the_other_commands_run_or_name_all_that_is_missing_in_one_line(tmp_path):
    commands = [*cli.COMMANDS][1:]
    code, out, errors = _run(
        f"""
from apex.bench.cli import main
more = {{"bench plot": ["a"]}}
more["selftest"] = ["--only", "FusedSGD, fp32", "--json", {str(tmp_path / "f.json")!r}]
for name in {commands}:
    print(name, main([*name.split(), *more.get(name, [])]))
"""
    )
    assert code == 0, errors
    assert [line for line in out.splitlines() if line[-2:] in (" 0", " 2")] == [
        f"{name} {0 if name == 'selftest' else 2}" for name in commands
    ]
    assert "Kernels: not run: triton, numpy not installed: pip install triton numpy." in out
    lines = errors.splitlines()
    assert len(lines) == len(commands) - 1
    everything = "matplotlib numpy rich scipy scikit-learn"
    assert lines[0].endswith(f" not installed: pip install {everything}")
    assert lines[-1] == "apex kernels: rich, triton not installed: pip install rich triton"
