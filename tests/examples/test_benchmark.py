"""The tutorial's two command lines, on a task that takes seconds, in this process."""

import pathlib
import runpy
import sys

import pytest

from apex.commands.bench.training import plots
from tests.examples.imported import EXAMPLES

FOLDER = EXAMPLES / "benchmark"
BATCHES = ("128", "256", "512", "1024", "2048")


@pytest.fixture
def start(monkeypatch, tmp_path, capsys):
    """Run a program; its exit code, and what it wrote to standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)

    def start(program, *words):
        monkeypatch.setattr(sys, "argv", [program, *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(FOLDER / program), run_name="__main__")
        return ended.value.code, capsys.readouterr().err

    yield start
    sys.modules.pop("run_benchmark", None)


@pytest.mark.slow
def test_the_tutorials_command_lines(start, monkeypatch):
    """It takes 4 s: a process that trains, and six pictures."""
    words = ["--task", "linear", "--seeds", "1", "--epochs", "1", "--quick", "--device", "cpu"]
    words += ["--method", "FP32", "amp", "--batch", "128"]  # all take three times as long
    with monkeypatch.context() as patch:  # the second program draws the same
        patch.setattr(plots, "draw", lambda *_: {})
        code, errors = start("run_benchmark.py", "--GPU", "RTX", *words)
    assert code == 0, errors
    assert pathlib.Path("results/RTX/report.html").exists()
    method = ["--method", "FP32", "amp", "--batch", *BATCHES]
    code, errors = start("make_plot.py", "--GPU", "RTX", *method)
    assert code == 0, errors
    assert {"time.png", "memory.png"} <= {path.name for path in pathlib.Path("plots").iterdir()}
    code, errors = start("make_plot.py", "--GPU", "RTX", "GTX")
    assert code == 2
    assert "there are RTX" in errors


def test_a_name_that_is_no_folder_is_refused(start, tmp_path):
    code, errors = start("run_benchmark.py", "--GPU", "../../elsewhere")
    assert code == 2
    assert "--GPU" in errors
    assert not list(tmp_path.iterdir())
