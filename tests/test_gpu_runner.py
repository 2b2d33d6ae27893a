"""``./dev gpu``: parts run in processes, what they find is kept and summed up."""

import json
import pathlib
import subprocess
import sys
import time

import pytest

from tests.test_dev import ROOT, SCRIPT

tools = pytest.importorskip("tools.gpu.__main__", reason="not in a checkout")

from tools.gpu import part, thresholds, times  # noqa: E402  after the check that there are tools
from tools.gpu.rows import Rows  # noqa: E402

HANGS = """
import sys, subprocess, time
from pathlib import Path
from tools.gpu.rows import Rows
rows = Rows(Path(sys.argv[2]))
rows.add("first")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
rows.add(str(child.pid))
time.sleep(60)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a program that a part can run as a module, and return its name."""

    def write(text):
        (tmp_path / "program_of_a_part.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "program_of_a_part"

    return write


def run(name, file, limit=60.0):
    made = tools.Part([name], limit)
    return tools.run_part(made, file, False, tools.time.monotonic() + 100)


@pytest.mark.slow
def test_what_a_part_found_stays_when_it_is_killed(module, tmp_path):
    file = tmp_path / "part.json"
    found = run(module(HANGS), file, 3.0)
    assert [row["status"] for row in found["rows"]] == ["right", "right", "wrong"]
    assert found["rows"][-1]["said"] == "not finished in 3 s"
    assert json.loads(file.read_text())["rows"] == found["rows"]
    child = pathlib.Path("/proc", found["rows"][1]["name"], "stat")
    until = time.monotonic() + 20
    while child.exists() and ") Z" not in child.read_text() and time.monotonic() < until:
        time.sleep(0.01)
    assert not child.exists() or ") Z" in child.read_text()


def test_a_part_that_dies_is_a_failure_with_its_last_words(module, tmp_path):
    found = run(module("raise SystemExit('no such library')"), tmp_path / "part.json")
    assert found["rows"] == [
        {"name": "", "status": "wrong", "said": "ended with 1: no such library"}
    ]


def test_a_missing_package_is_no_failure_and_an_error_is_one_line(monkeypatch):
    monkeypatch.setattr(part, "_restore", lambda: None)  # for a process of its own

    def missing():
        import no_such_package  # noqa: F401

    def wrong():
        raise ValueError("two\nlines")

    assert part.carry_out(missing) == ("missing", "no_such_package is not installed")
    status, said = part.carry_out(wrong)
    assert status == "wrong"
    assert said.startswith("ValueError: two lines (")


@pytest.mark.parametrize(("after", "status"), [(1.09, "right"), (1.2, "unsteady")])
def test_rows_between_controls_that_differ_are_marked(after, status, tmp_path):
    """The control is timed before, in its turns and after; a ratio is that of neighbours."""
    clock = times.Clock(1, 3)
    taken = iter([1.0, 2.0, 3.0, 3.0, 2.0, 2.0, 3.0, after])  # before, three turns, after

    class Fake(times.Clock):
        def __call__(self, work):
            return next(taken)

    rows = Rows(tmp_path / "part.json")
    row = [times.Row("theirs", lambda: int), times.Row("ours", lambda: int, "theirs")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(times.torch.cuda, "synchronize", lambda: None)
        times.time_group("group", row, Fake(clock.repeat, clock.turns), rows)
    found = {one["name"]: one for one in rows.content["rows"]}
    assert found["group: ours"]["ratio"] == 1.5
    assert {one["status"] for one in found.values()} == {status}


def test_a_selftest_becomes_rows():
    number = {"what": "weights", "value": 3.0, "allowed": 1.0, "right": False}
    check = {"area": "a", "name": "n", "path": "p", "status": "wrong", "error": None}
    (row,) = tools.as_rows({"checks": [{**check, "measured": [number]}]})["rows"]
    assert row == {"name": "a: n (p)", "status": "wrong", "said": "weights: 3 of 1"}


@pytest.mark.slow
def test_a_dry_run_of_named_parts(tmp_path):
    """In the Python that runs the script, without an environment of the project."""
    words = ["gpu", "ops", "suite", "--dry", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        file.stem.rpartition("-")[2]: json.loads(file.read_text()) for file in tmp_path.iterdir()
    }
    assert found.keys() == {"versions", "ops", "suite"}
    assert len(found["ops"]["rows"]) == 12
    assert found["suite"]["passed"] > 20
    assert found["suite"]["finished"]
    assert "ops " in done.stdout


def test_every_folder_of_tests_is_in_the_suite_once_and_trainings_are_first():
    assert tools.SUITE[:3] == ["tests/amp", "tests/optimizers", "tests/ops"]
    files = [path.relative_to(ROOT / "tests") for path in ROOT.glob("tests/*/**/test_*.py")]
    assert sorted(tools.SUITE) == sorted({f"tests/{file.parts[0]}" for file in files})


def test_a_name_that_no_part_begins_with_is_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        tools.main(["nonsense"])
    assert "'nonsense' is no part: choose from checks, times, suite, " in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_gpu_it_says_what_to_do(tmp_path):
    words = [sys.executable, "-m", "tools.gpu", "times", "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "sees no GPU; ./dev gpu --dry runs every part on a CPU" in done.stderr
    assert [*tmp_path.iterdir()] == []


def test_a_threshold_is_where_ours_is_never_slower_from_there_on():
    sizes = [1, 2, 4, 8]
    assert thresholds.crossing(sizes, [9, 9, 1, 1], [2, 2, 2, 2]) == 4
    assert thresholds.crossing(sizes, [9, 1, 9, 1], [2, 2, 2, 2]) == 8  # not from 2 on
    assert thresholds.crossing(sizes, [1, 1, 1, 2], [2, 2, 2, 2]) == 1
    assert thresholds.crossing(sizes, [9, 9, 9, 9], [2, 2, 2, 2]) == 16  # beyond what was measured


def test_a_measured_row_has_what_the_table_of_thresholds_needs():
    row = thresholds.row({"gpu": 64, "wall": 32}, "a card", "3.7.1")
    assert row["gpu"] == row["wall"] == 64  # wall is never below: the kernel would be slower
    assert row["derived"] is None
    assert row.keys() == next(iter(thresholds.load_table().values())).keys()
    assert thresholds.timed_operations().keys() == thresholds.load_table().keys()
