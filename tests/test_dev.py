"""The script at the root; its set-up itself is tried out by every use of it."""

import importlib.machinery
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = ROOT / "dev"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not in a checkout")


@pytest.fixture
def dev(tmp_path, monkeypatch):
    """The script as a module, pointed at a small project of its own."""
    loader = importlib.machinery.SourceFileLoader("dev_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader("dev_script", loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    (tmp_path / "src/apex").mkdir(parents=True)
    (tmp_path / "src/apex/__init__.py").write_text('__version__ = "1"\n')
    (tmp_path / "pyproject.toml").write_text("a = 1\n")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\nhatchling==1.0; x\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "CONSTRAINTS", tmp_path / "constraints.txt")
    return module


@pytest.fixture
def pinned(dev):
    """The environment that is set up, with the pinned torch."""
    return dev.Environment(dev.ROOT / ".venv")


@pytest.fixture
def calls(dev, monkeypatch):
    """Replace what is slow; the list holds the set-up steps that were taken."""
    steps = []

    def make_venv(words, **kwargs):
        steps.append("venv")
        python = dev.Environment(pathlib.Path(words[-1])).python
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text("")
        return subprocess.CompletedProcess(words, 0, "")

    def pip(words, **kwargs):
        steps.append(words[-1])
        return 0

    monkeypatch.setattr(dev.subprocess, "run", make_venv)
    monkeypatch.setattr(dev, "_run", pip)
    monkeypatch.setattr(dev.sys, "stderr", sys.__stderr__)
    return steps


FULL = ["venv", "hatchling==1.0", ".[bench,dev,docs,examples]"]


def _run(*words):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False
    )


def test_help_lists_the_commands():
    done = _run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(word in done.stdout for word in ("demo", "test", "check", "clients", "--all"))


@pytest.mark.parametrize(("words", "said"), [(["fly"], "'fly' is not a command"), ([], "which")])
def test_bad_command_gets_one_line_and_2(words, said):
    done = _run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert "demo, test, check, docs or clients" in done.stderr


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["demo", "--x"], ["apex", "bench", "--quick", "--budget", "90s", "--x"]),
        (["clients", "timm"], ["tests.clients", "timm"]),
        (["test", "tests/amp"], ["pytest", "tests/amp"]),
        (["test", "--all"], ["pytest", "--numprocesses=auto", "--all"]),
    ],
)
def test_a_command_hands_over_to_its_module(dev, pinned, monkeypatch, words, module):
    monkeypatch.setattr(dev, "set_up", lambda environment: None)
    handed = []
    monkeypatch.setattr(dev, "_hand_over", lambda words: handed.extend(words) or 0)
    assert dev.main(words) == 0
    assert handed == [str(pinned.python), "-m", *module]


def test_second_set_up_does_nothing(dev, pinned, calls):
    dev.set_up(pinned)
    dev.set_up(pinned)
    assert calls == FULL


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pyproject.toml", "a = 2\n"),
        ("constraints.txt", "torch==2.13.0\nhatchling==1.0\n"),
        ("src/apex/__init__.py", '__version__ = "2"\n'),
    ],
)
def test_a_changed_input_installs_into_the_same_environment(dev, pinned, calls, file, text):
    dev.set_up(pinned)
    (dev.ROOT / file).write_text(text)
    dev.set_up(pinned)
    assert calls == FULL + FULL[1:]


def test_an_environment_that_was_moved_is_made_anew(dev, pinned, calls):
    dev.set_up(pinned)
    pinned.made_for.write_text("another place")
    pinned.stamp.write_text("another place")
    dev.set_up(pinned)
    assert calls == FULL + FULL


def test_an_interrupted_set_up_leaves_no_stamp_and_begins_anew(dev, pinned, calls, monkeypatch):
    def interrupted(words, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dev, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dev.set_up(pinned)
    assert not pinned.stamp.exists()
    dev.set_up(pinned)
    assert calls == ["venv", *FULL]


def test_a_failed_install_leaves_no_stamp_and_keeps_the_environment(
    dev, pinned, calls, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(dev, "_run", lambda words, **kwargs: 1)
        with pytest.raises(dev.SetUpError, match=r"pip cannot install torch==2\.13\.0: no reason"):
            dev.set_up(pinned)
    assert not pinned.stamp.exists()
    dev.set_up(pinned)
    assert calls == FULL


@pytest.mark.parametrize("place", [0, 1])
def test_another_torch_has_its_own_environment(dev, monkeypatch, calls, place):
    monkeypatch.setattr(dev, "_hand_over", lambda words: calls.append(words) or 0)
    words = ["-x"]
    words[place:place] = ["--torch", "2.9.1"]
    assert dev.main(["test", *words]) == 0
    other = dev.Environment(dev.ROOT / ".torch" / "2.9.1", "2.9.1")
    run = [str(other.python), "-m", *dev.TESTS, "-x"]
    assert calls == ["venv", "hatchling==1.0", ".[bench,dev,examples]", run]
    assert dev.main(["test", *words]) == 0
    assert calls[4:] == [run]
    assert not (dev.ROOT / ".venv").exists()


def test_another_torch_is_installed_without_what_belongs_to_the_pinned_one(dev, calls, monkeypatch):
    pins = "# text\ntorch==2.13.0\ntriton==3; x\ncuda-bindings==1\nnvidia-nvjitlink==1\n"
    dev.CONSTRAINTS.write_text(pins + "numpy==2.2; x\nnumpy==2.4; y\nhatchling==1.0\ntorchx==1\n")
    asked = []
    monkeypatch.setattr(dev, "_run", lambda words, **kwargs: asked.append(words) or 0)
    environment = dev.Environment(dev.ROOT / ".torch" / "2.9.1", "2.9.1")
    dev.set_up(environment)
    assert asked[0][-2:] == ["torch==2.9.1", "hatchling==1.0"]
    (file,) = {words[words.index("--constraint") + 1] for words in asked}
    kept = pathlib.Path(file).read_text().splitlines()
    assert kept == ["# text", "hatchling==1.0", "torchx==1", "numpy<2.4"]


@pytest.mark.parametrize("version", [[], ["../2.9"], ["tests/amp"], ["--all"]])
def test_what_is_no_version_gets_one_line_and_2(dev, capsys, version):
    assert dev.main(["test", "--torch", *version]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--torch needs a version" in said


def test_no_network_is_said_in_one_line(dev, tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "WARNING: Retrying: NewConnectionError('...')\nERROR: No matching distribution\n"
    )
    message = dev._why_pip_failed(["torch==2.13.0", "hatchling"], log)
    assert "cannot download torch==2.13.0: no package index answers" in message
    assert "\n" not in message


def test_pip_s_first_error_is_quoted(dev, tmp_path):
    log = tmp_path / "log"
    log.write_text("WARNING: slow\nERROR: No matching distribution found for torch\nERROR: See\n")
    message = dev._why_pip_failed(["torch==2.13.0"], log)
    assert "cannot install torch==2.13.0: No matching distribution found for torch (log" in message


def test_no_venv_module_is_said_in_one_line(dev, pinned, monkeypatch):
    answer = "The virtual environment was not created because ensurepip is not available.\n..."
    done = subprocess.CompletedProcess([], 1, answer)
    monkeypatch.setattr(dev.subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(dev.SetUpError, match="apt install python3-venv"):
        dev.set_up(pinned)


def test_check_stops_at_the_first_failure(dev, pinned, monkeypatch, capsys):
    ran = []

    def run(words):
        ran.append(words[2:])
        return 1 if words[2] == "mypy" else 0

    monkeypatch.setattr(dev, "_run", run)
    assert dev.check(pinned, ["-k", "amp"]) == 1
    assert [words[0] for words in ran] == ["ruff", "ruff", "mypy"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "check: types failed (exit code 1); passed before it: format, lint"


def test_check_passes_arguments_to_pytest_alone(dev, pinned, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(dev, "_run", lambda words: ran.append(words[2:]) or 0)
    assert dev.check(pinned, ["--all"]) == 0
    assert ran[-1] == [*dev.TESTS, "--all"]
    assert all("--all" not in words for words in ran[:-1])
    assert capsys.readouterr().out.endswith("check: passed (format, lint, types, docs, tests)\n")


def test_every_pin_is_exact():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[\w-]+==[\w.]+(; .+)?", line)] == []
    assert "torch==2.13.0" in pins
