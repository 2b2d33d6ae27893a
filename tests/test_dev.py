"""The script at the root; its set-up itself is tried out by every use of it."""

import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

from apex.commands.command_line import COMMANDS

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = ROOT / "dev"
PINS = "torch==2.13.0\ntriton==3; x\nnvidia-a==1\nnumpy==2.4; y\nhatchling==1.0; x\ntorchx==1\n"
VERSION = "src/apex/__init__.py"
NO_VERSIONS = ["", "../2.9", "tests/amp", "--all"]
REST = ["pytest", "--numprocesses=auto", "--rest"]
FULL = ["venv", "hatchling==1.0", ".[dev]"]

VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")
# What each of them is, on this processor and as others.
ITS_OWN = (None, None, None)
OTHERS = [(None, "AVX512_CORE", None), ("avx2", "AVX2", None), ("default", "SSE41", "COMPATIBLE")]

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not in a checkout")


@pytest.fixture
def dev(tmp_path, monkeypatch):
    """The script as a module in a small project; ``ran`` lists what it has run, which took none."""
    module = types.ModuleType("dev_script")
    module.__file__ = str(SCRIPT)
    exec(compile(SCRIPT.read_text(), SCRIPT, "exec"), vars(module))
    (tmp_path / "src/apex").mkdir(parents=True)
    for name, text in (("constraints.txt", PINS), ("pyproject.toml", ""), (VERSION, "")):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    module.ROOT, module.venv, module.ran, module.answer = tmp_path, tmp_path / ".venv", [], 0
    module.limits = []

    def make_venv(words, **options):
        module.ran.append("venv")
        pathlib.Path(words[-1]).mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(words, 0, "")

    def run(words, env=None, **streams):
        if "pip" in words:
            os.write(streams["stderr"], b"".join(b"line %d\n" % line for line in range(9)))
        module.limits.append(tuple((os.environ if env is None else env).get(v) for v in VARIABLES))
        module.ran.append(words[-1] if "pip" in words else words[2:])
        if module.answer is KeyboardInterrupt:
            raise KeyboardInterrupt
        return module.answer

    monkeypatch.setattr(module.subprocess, "run", make_venv)
    monkeypatch.setattr(module, "run", run)
    return module


@pytest.mark.parametrize("words", ["fly", *(f"test --torch {word}" for word in NO_VERSIONS)])
def test_a_bad_command_gets_one_line_and_2(words):
    words = words.split()
    call = [sys.executable, SCRIPT, *words]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    said = (
        "--torch needs a version"
        if words[1:]
        else "choose demo, test, check, docs, clients, kernels or gpu"
    )
    assert said in done.stderr


def test_a_command_sets_up_once_and_runs_its_module(dev, capsys, monkeypatch):
    assert dev.main(["--help"]) == 0
    commands = ("demo", "test", "check", "docs", "clients", "kernels", "gpu")
    commands += ("--all", "--torch", "--processors")
    assert all(word in dev.USAGE for word in commands)
    assert max(map(len, dev.USAGE.splitlines())) <= 80
    assert capsys.readouterr() == (dev.USAGE, "")
    assert dev.main([]) == 2
    assert capsys.readouterr() == ("", dev.USAGE)
    monkeypatch.setattr(sys, "version_info", (3, 11))  # for Sphinx
    for words, module in (
        (["demo", "--x"], [*dev.DEMO, "--x"]),
        (["clients", "timm"], ["tests.clients", "timm"]),
        (["kernels", "--kernel", "lion"], ["tools.kernels", "--kernel", "lion"]),
        (["test", "tests/amp"], ["pytest", "tests/amp"]),
        (["test", "--all"], ["pytest", "--numprocesses=auto", "--all"]),
        (["docs"], dev.DOCS),
    ):
        assert dev.main(words) == 0
        assert dev.ran.pop() == module
    assert dev.ran == FULL
    assert capsys.readouterr().out == f"Open {dev.ROOT / 'site' / 'index.html'} in a browser.\n"


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt", VERSION])
def test_a_changed_input_installs_into_the_same_environment(dev, file):
    dev.set_up(dev.venv, "")
    with (dev.ROOT / file).open("a") as changed:
        changed.write('__version__ = "2"\n')
    dev.set_up(dev.venv, "")
    assert dev.ran == FULL + FULL[1:]


def test_an_interrupted_set_up_begins_anew_and_a_failed_one_goes_on(dev, capsys):
    for dev.answer, error in ((KeyboardInterrupt, KeyboardInterrupt), (1, SystemExit)):
        with pytest.raises(error):
            dev.set_up(dev.venv, "")
    assert "network):\nline 4\nline 5\nline 6\nline 7\nline 8\n" in capsys.readouterr().err
    dev.answer = 0
    dev.set_up(dev.venv, "")
    assert dev.ran == [*FULL[:2], *FULL[:2], *FULL[1:]]


def test_another_torch_has_its_own_environment_and_versions(dev):
    for words in (["--torch", "2.9.1", "-x"], ["-x", "--torch", "2.9.1"]):
        assert dev.main(["test", *words]) == 0
    run = [*dev.TESTS, "-x"]
    assert dev.ran == ["venv", "torch==2.9.1", ".[dev]", run, run]
    versions = (dev.ROOT / ".torch/2.9.1/constraints.txt").read_text().split()
    assert versions == ["hatchling==1.0;", "x", "torchx==1", "numpy<2.4", "torch==2.9.1"]
    assert not dev.venv.exists()


def test_a_gpu_is_asked_without_an_environment(dev):
    assert dev.main(["gpu", "times"]) == 0
    assert dev.ran == [["tools.gpu", "times"]]


def test_an_environment_behind_a_link_is_left_alone(dev, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    dev.venv.symlink_to(other)
    dev.set_up(dev.venv, "")  # an empty folder on a larger disk, say
    (other / "pyvenv.cfg").write_text("")
    (other / "stamp").write_text("/another/tree\n")
    with pytest.raises(SystemExit, match="2"):
        dev.set_up(dev.venv, "")
    assert dev.ran == FULL


def test_no_venv_module_is_said_in_one_line(dev, monkeypatch, capsys):
    done = subprocess.CompletedProcess([], 1, "ensurepip is not available.\n\n...")
    monkeypatch.setattr(dev.subprocess, "run", lambda *words, **options: done)
    with pytest.raises(SystemExit, match="2"):
        dev.set_up(dev.venv, "")
    last = capsys.readouterr().err.splitlines()[-1]
    assert "apt install python3-venv): ensurepip is not available. ..." in last


def test_check(dev, capsys, monkeypatch):
    """It stops at the first failure, and passes arguments to pytest alone."""
    monkeypatch.setattr(sys, "version_info", (3, 11))  # for Sphinx
    others = [*[["pytest", "-m", "onednn"]] * 2, dev.TESTS]
    for words, tests in ((["--all"], [[*dev.TESTS, "--all"]]), ([], [dev.TESTS, REST])):
        dev.ran.clear()
        assert dev.check("python", words) == 0
        assert dev.ran[4:] == [*tests, *others, ["tools.gpu", "--dry"]]
        assert dev.limits[-5:] == [ITS_OWN, *OTHERS, ITS_OWN]
    done = "check: passed (format, lint, types, docs, tests, tests --rest, tests of AVX512_CORE"
    assert done in capsys.readouterr().out
    dev.answer, dev.ran[:] = 1, []
    assert dev.check("python", []) == 1
    assert dev.ran == [["ruff", "format", "--check"]]
    assert "check: format failed, of format, lint, types, " in capsys.readouterr().out


@pytest.mark.parametrize("given", [[], ["tests/RNN", "-x"]])
def test_processors(dev, given, capsys, monkeypatch):
    """All run, whatever fails; variables of the caller are not mixed with those of another."""
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    words = ["pytest", *given] if given else dev.TESTS
    assert dev.main(["test", *given, "--processors"]) == 0
    assert dev.ran[3:] == [words] * 4
    assert dev.limits[-4:] == [(None, None, "AVX2"), *OTHERS]
    assert "test: passed, of this processor, AVX512_CORE, AVX2, SSE41\n" in capsys.readouterr().out
    names, answers = ["this processor", *dev.PROCESSORS], iter([0, 1, 0, 2])
    monkeypatch.setattr(dev, "run", lambda words, env: next(answers))
    assert dev.main(["test", *given, "--processors"]) == 1
    said = f"test: failed as {names[1]}, {names[3]}, of {', '.join(names)}\n"
    assert said in capsys.readouterr().out


def test_every_pin_is_exact():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[\w-]+==[\w.]+(; .+)?", line)] == []
    assert "torch==2.13.0" in pins


# --- what a forge and git run --------------------------------------------------------------------


def read(name):
    return pytest.importorskip("yaml").safe_load((ROOT / name).read_text("utf-8"))


def test_a_forge_runs_what_every_change_must_pass():
    (job,) = read(".github/workflows/check.yml")["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    project = (ROOT / "pyproject.toml").read_text()
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert job["strategy"]["matrix"]["python"] == [supported[0], supported[-1]]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_a_commit_is_checked_as_a_change_is(dev):
    """With the tools of the environment; ruff formats instead of asking whether it would."""
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    hooks = {hook["id"]: hook["entry"].split() for hook in repository["hooks"]}
    named = {name: [word for word in hook if word[0] != "-"] for name, hook in hooks.items()}
    assert named == {
        name: [word for word in words if word[0] != "-"] for name, words in dev.LINTS.items()
    }


def test_a_report_has_what_apex_info_says():
    """And the commands that the form names are commands."""
    form = read(".github/ISSUE_TEMPLATE/bug.yml")
    fields = {field["id"]: field for field in form["body"] if "id" in field}
    assert "`apex info`" in fields["info"]["attributes"]["label"]
    assert fields["info"]["validations"]["required"]
    named = re.findall(r"`apex ([a-z-]+)", str(form))
    assert {"info", "debug", "selftest"} == {*named} <= {*COMMANDS}
