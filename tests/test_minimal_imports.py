"""Every module of apex imports where torch is alone: Windows, macOS, minimal builds."""

import pathlib
import re
import subprocess
import sys

import pytest

import apex
from apex.commands import command_line as cli
from tests import minimal

TESTS = pathlib.Path(__file__).parent
ROOT = TESTS.parent

# package -> what its modules may need, by design; `apex info` needs nothing
NEEDS = {
    "apex.commands.bench.": {"matplotlib", "msgspec", "numpy", "rich", "sklearn"},
    "apex.kernels.": {"triton"},
}

PREPARE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import minimal
minimal.become_minimal()
"""


def _run(program):
    # The warning is torch's own, about the NumPy that is not there.
    ignored = "ignore:Failed to initialize NumPy:UserWarning"
    words = [sys.executable, "-W", "error", "-W", ignored, "-c", PREPARE + program]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
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


@pytest.mark.slow
def test_each_command_runs_or_names_all_that_is_missing_in_one_line(tmp_path):
    """The machine is minimal, as the first lines show; else nothing here would be tested.

    It takes 3 s and the test above 2: each has a process that imports torch in its own way.
    """
    commands = [*cli.COMMANDS]
    code, out, errors = _run(
        f"""
import contextlib, io, json
blocked = ("triton", "numpy", "fcntl", "resource", "rich", "torch.distributed")
for name in blocked:
    try:
        exec(f"import {{name}}", {{"__name__": "apex.probe"}})
    except ModuleNotFoundError as error:
        print(error)
from apex.commands.command_line import main
from apex.commands.info import speeds
speeds.SIZES, speeds.SECONDS = {{"cpu": (8, 1)}}, 0
more = {{"bench plot": ["a"], "info": ["--json"], "debug": ["a"], "debug repro": ["a"]}}
more["what-if"] = more["check"] = ["a"]
more["selftest"] = ["--only", "rms norm, fp32, forward", "--json", {str(tmp_path / "f.json")!r}]
more["selftest"] += ["--processes", "0"]  # another process would not be minimal
for name in {commands}:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main([*name.split(), *more.get(name, [])])
    print(name, code)
    if name == "info":
        print(json.loads(said.getvalue())["versions"]["apex"])
    elif name == "selftest":
        print([line for line in said.getvalue().splitlines() if line.startswith("Kernels: ")])
"""
    )
    assert code == 0, errors
    found = out.splitlines()
    absent = ("triton", "numpy", "fcntl", "resource", "rich")
    assert found[:5] == [f"No module named {name!r}" for name in absent]
    assert found[5].startswith("apex.probe imports")
    codes = [line for line in found[6:] if line[:-2] in commands]
    runs = ("info", "selftest")
    assert codes == [f"{name} {0 if name in runs else 2}" for name in commands]
    assert apex.__version__ in found
    assert "['Kernels: not run: triton, numpy not installed: pip install triton numpy.']" in found
    lines = errors.splitlines()
    assert len(lines) == len(commands) - len(runs)
    everything = "matplotlib msgspec numpy rich scipy scikit-learn"
    how = f"pip install {everything} (in a clone of apex: pip install '.[bench]')"
    assert lines[0].endswith(f" not installed: {how}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["what-if", "examples/what_if/train.py:build"], 0, "bfloat16 computes `attention`"),
        (["check", "examples/check/train.py"], 3, "1  clip-before-unscale"),
        (["debug", "--out", "OUT", "examples/debug/attention.py"], 0, "bmm in module attention"),
        (
            ["what-if", "digits-cnn"],
            2,
            "task digits-cnn needs scikit-learn: pip install scikit-learn\n",
        ),
        (["what-if", "bert-base"], 2, "task bert-base needs transformers: pip install transf"),
    ],
)
def test_commands_on_a_model_do_their_work_with_torch_alone(words, code, said, tmp_path):
    words = [str(ROOT / one) if "/" in one else one.replace("OUT", str(tmp_path)) for one in words]
    ended, out, errors = _run(
        f"""
from apex.commands.command_line import main
sys.exit(main({words!r}))
"""
    )
    assert ended == code, errors
    assert said in out + errors
    assert "Traceback" not in errors


def test_all_that_the_extras_bring_is_hidden():
    """Except what torch itself brings, Jinja2."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = re.findall(r"^(?:bench|examples) = \[(.+)\]", text, re.MULTILINE)
    names = set(re.findall(r'"([\w-]+)', " ".join(listed))) - {"jinja2"}
    assert {one.replace("scikit-learn", "sklearn") for one in names} == minimal.EXTRAS
