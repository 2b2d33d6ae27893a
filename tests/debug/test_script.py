"""How `apex debug` runs a program: paths, folders, zip files, errors, an import it waits for."""

import functools
import subprocess
import sys
import zipfile

import pytest

from apex.commands.debugging import script


@pytest.fixture(autouse=True)
def _as_before(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


PROGRAM = "import sys\nprint(__name__, sys.argv, sys.path[0], __file__)\n"


@pytest.mark.parametrize("kind", ["folder", "zip", "link"])
def test_what_python_runs_is_run(tmp_path, capsys, kind):
    (tmp_path / "folder").mkdir()
    program = tmp_path / "folder" / "__main__.py"
    program.write_text(PROGRAM)
    if kind == "zip":
        with zipfile.ZipFile("zip", "w") as archive:
            archive.write(program, "__main__.py")
    if kind == "link":
        (tmp_path / "link").symlink_to(program)

    assert script.exit_code(script.prepare(kind, ["a"], as_module=False)) == 0

    first = tmp_path / ("folder" if kind == "link" else kind)  # Python follows links here
    file = tmp_path / ("link" if kind == "link" else f"{kind}/__main__.py")
    assert capsys.readouterr().out == f"__main__ {[kind, 'a']} {first} {file}\n"


def run(text):
    return script.exit_code(functools.partial(exec, text, {"__name__": "program"}))


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(-1)", -1, ""),
        ("raise SystemExit(2.5)", 1, "2.5\n"),
        ("raise SystemExit('no')", 1, "no\n"),
        ("class Stop(BaseException): pass\nraise Stop('now')", 1, "program.Stop: now\n"),
        ("1 +", 1, "SyntaxError: invalid syntax\n"),
    ],
)
def test_exit_codes(capsys, text, code, said):
    assert run(text) == code
    found = capsys.readouterr().err
    assert found.endswith(said)
    assert bool(found) == bool(said)
    assert "script.py" not in found  # frames of this command


def test_a_hook_for_errors_gets_the_programs_frames_and_may_choose_the_code(monkeypatch):
    seen = []

    def hook(kind, error, frames):
        seen.append((kind, frames.tb_frame.f_globals["__name__"], error.__traceback__ is frames))
        sys.exit(9)

    monkeypatch.setattr(sys, "excepthook", hook)
    assert run("{}['key']") == 9
    assert seen == [(KeyError, "program", True)]


def test_a_module_is_told_of_after_it_has_run(tmp_path, monkeypatch):
    (tmp_path / "waited.py").write_text("value = 3")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "waited", raising=False)
    finders, seen = list(sys.meta_path), []
    script.after_import("waited", lambda: seen.append(sys.modules["waited"].value))
    assert seen == []

    import waited

    assert seen == [3]
    assert sys.meta_path == finders
    assert "exec_module" not in vars(waited.__loader__)
    script.after_import("waited", lambda: seen.append("at once"))
    assert seen == [3, "at once"]


TRAINS = """
import torch
print("ran", torch.ones(1).item())
net = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(net.parameters(), 0.1)
torch.log(net(torch.ones(1, 2)) * 0).sum().backward()
opt.step()
"""
FAILS = """
import sys
sys.modules["apex.optimizers.fused_sgd"] = None
try:
    from apex.optimizers import FusedAdam
except ImportError:
    del sys.modules["apex.optimizers.fused_sgd"]
"""
BESIDE = "import threading; threading.Thread(target=__import__, args=('apex.RNN',)).start()"
BEFORE = """
import threading
imports = threading.Thread(target=__import__, args=("torch",))
imports.start()
imports.join()
"""
FIRST = ["from apex import amp", "import apex.debug", "import amp_C", FAILS, BESIDE, BEFORE]


@pytest.mark.slow
@pytest.mark.parametrize("line", FIRST)
@pytest.mark.parametrize("command", ["debug", "check"])
def test_a_program_may_import_apex_before_torch(line, command, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(line + TRAINS)
    words = [sys.executable, "-m", "apex", command, str(file)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert "ran 1.0" in done.stdout, done.stderr
    assert "Error" not in done.stderr
    assert {"debug": "torch.log" in done.stderr, "check": "in 1 step" in done.stderr}[command]
