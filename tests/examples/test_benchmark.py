"""The tutorial's two command lines, on a task that takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "benchmark"
BATCHES = ("128", "256", "512", "1024", "2048")


def start(program, *words, cwd):
    return subprocess.run(
        [sys.executable, str(FOLDER / program), *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_the_tutorials_command_lines(tmp_path):
    words = ["--task", "linear", "--seeds", "1", "--epochs", "1", "--quick", "--device", "cpu"]
    words += ["--batch", "128"]  # all five take three times as long
    done = start("run_benchmark.py", "--GPU", "RTX", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "RTX" / "report.html").exists()
    method = ["--method", "FP32", "FP16", "amp", "--batch", *BATCHES]
    done = start("make_plot.py", "--GPU", "RTX", *method, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"time.png", "memory.png"} <= {path.name for path in (tmp_path / "plots").iterdir()}
    done = start("make_plot.py", "--GPU", "RTX", "GTX", cwd=tmp_path)
    assert done.returncode == 2
    assert "there are RTX" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_is_no_folder_is_refused(tmp_path):
    done = start("run_benchmark.py", "--GPU", "../../elsewhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "--GPU" in done.stderr
    assert not list(tmp_path.iterdir())
