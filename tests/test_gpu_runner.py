"""``./dev gpu``: parts run in processes, what they find is kept and summed up."""

import json
import pathlib
import subprocess
import sys
import time

import pytest
import torch

from tests.test_dev import ROOT, SCRIPT

tools = pytest.importorskip("tools.gpu.__main__", reason="not in a checkout")

from apex.commands.selftest.gpu import waits_refused  # noqa: E402  after the check that there are tools
from tools.gpu import checking, part, stand_ins, thresholds, times  # noqa: E402
from tools.gpu.rows import NOT_DRY, RIGHT, UNSTEADY, WRONG, Rows  # noqa: E402

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


class Planted(times.Clock):
    """Takes planted times, and keeps in which order works are timed."""

    def __call__(self, work):
        ORDER.append(work)
        return 1.0


ORDER = []


def test_rows_run_in_turns_between_two_times_of_the_control(tmp_path, monkeypatch):
    """A slower minute of the machine meets all of them, first and last in each turn."""
    monkeypatch.setattr(times.torch.cuda, "synchronize", lambda: None)
    ORDER.clear()
    made = [times.Row(name, lambda name=name: name.upper) for name in ("control", "a", "b")]
    times.time_group("group", made, Planted(1, 2, host=True), Rows(tmp_path / "part.json"))
    names = [work.__self__ for work in ORDER]
    assert names == ["control", "control", "a", "b", "b", "a", "control", "control"]


def test_turns_of_a_group_that_is_killed_are_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(times.torch.cuda, "synchronize", lambda: None)
    taken = iter([1.0, 2.0, 3.0, 4.0])

    class Killed(times.Clock):
        def __call__(self, work):
            return next(taken)

    made = [times.Row("theirs", lambda: int), times.Row("ours", lambda: int)]
    rows = Rows(tmp_path / "part.json")
    with pytest.raises(StopIteration):
        times.time_group("group", made, Killed(1, 2), rows)
    left = json.loads(rows.file.read_text())["unfinished"]
    assert left == {"group": {"theirs": [2.0], "ours": [3.0, 4.0]}}


def test_the_table_at_the_end(capsys):
    """What failed, what is missing or not run dry, ratios with their marks; none in a dry run."""
    planted = [
        {"name": "check", "status": WRONG, "said": "off by 3"},
        {"name": "ours", "status": RIGHT, "said": "", "ms": 0.5, "ratio": 0.25, "over": "torch's"},
        {
            "name": "host",
            "status": UNSTEADY,
            "said": "1 before",
            "ms": 1.0,
            "ratio": 2,
            "over": "x",
        },
        {"name": "numpy", "status": "missing", "said": "numpy is not installed"},
        {"name": "labels", "status": NOT_DRY, "said": "a CPU raises"},
    ]
    for has_times in (True, False):
        tools.show({"part": {"rows": planted}}, times=has_times)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["part:", "check:", "off", "by", "3"] in lines
        assert ["numpy", "is", "not", "installed"] in lines
        assert ["part:", "labels:", "a", "CPU", "raises"] in lines
        assert (["ours", "0.5000", "ms", "0.25", "torch's"] in lines) == has_times
        marked = ["host", "1.0000", "ms", "2.00", "x", "UNSTEADY:", "1", "before"]
        assert (marked in lines) == has_times


@pytest.mark.parametrize(("left", "limit"), [(1000.0, 60.0), (20.0, 20.0), (-5.0, 1.0)])
def test_a_part_gets_its_limit_or_what_all_have_left(left, limit, tmp_path, monkeypatch):
    given = []

    class Process:
        def __init__(self, *words, **options):
            pass

        def wait(self, seconds):
            given.append(seconds)
            return 0

        def poll(self):
            return 0

    monkeypatch.setattr(tools.subprocess, "Popen", Process)
    monkeypatch.setattr(tools.time, "monotonic", lambda: 100.0)
    tools.run_part(tools.Part(["x"], 60.0), tmp_path / "part.json", False, 100.0 + left)
    assert given == [limit]
    assert tools.LIMITS == {"checks": 330.0, "times": 240.0, "thresholds": 120.0, "tune": 540.0}


# --- checks ---------------------------------------------------------------------------------------


def test_what_runs_is_noted_and_a_lost_gpu_ends_the_part(tmp_path, monkeypatch):
    monkeypatch.setattr(part, "_restore", lambda: None)
    monkeypatch.setattr(part.torch.cuda, "synchronize", lambda: None)
    rows, noted = Rows(tmp_path / "part.json"), []

    def fails():
        noted.append(json.loads(rows.file.read_text())["running"])
        raise RuntimeError("illegal address")

    def not_dry():
        raise checking.NotDry("a CPU raises")

    monkeypatch.setattr(part, "is_lost", lambda: True)
    part.run_checks({"zero": not_dry, "one": fails, "two": fails}, rows)
    assert noted == ["one"]
    assert [row["status"] for row in rows.content["rows"]] == [NOT_DRY, WRONG, WRONG]
    assert rows.content["rows"][-1]["said"].endswith("no longer answers: 1 checks are not run")
    monkeypatch.setattr(part, "is_lost", lambda: False)
    part.run_checks({"one": fails, "two": fails}, rows)
    assert noted == ["one", "one", "two"]


def test_an_error_is_allowed_in_roundings_or_in_errors_of_torch():
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = exact.half()
    checking.no_farther(rounded, exact)
    third = (exact * (1 + 3 * 2.0**-11)).half()
    with pytest.raises(AssertionError, match="result off by .*, allowed"):
        checking.no_farther(third, exact, rounded, "result")
    checking.no_farther(third, exact, third)
    with pytest.raises(AssertionError, match=r"torch's is torch.float32, ours is torch.float16"):
        checking.no_farther(rounded, exact, exact.float(), "result")


# --- stand-ins ------------------------------------------------------------------------------------


def test_a_capture_of_the_stand_in_computes_nothing_and_replays_do():
    graph, x, total = stand_ins.Graph(), torch.ones(3), torch.zeros(3)
    with stand_ins.graph(graph):
        total.add_(x)
        torch._foreach_mul_([total], 2.0)
        y = total + 1
    assert not total.any()
    x.fill_(2.0)
    graph.replay()
    assert total.tolist() == [4.0] * 3
    graph.replay()
    assert (total.tolist(), y.tolist()) == ([12.0] * 3, [13.0] * 3)


def test_the_stand_in_refuses_waits_until_the_mode_is_given_back(monkeypatch):
    for name in ("set_sync_debug_mode", "get_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_ins, name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="waits for the device"), waits_refused():
        (x * 2).sum().item()
    assert x.sum().item() == 2.0
    assert torch.cuda.get_sync_debug_mode() == 0


def test_where_a_gpu_is_named_the_stand_in_takes_the_cpu():
    with stand_ins.on_a_cpu():
        layer = torch.nn.Linear(2, 2, device="cuda").to("cuda")
        found = [layer.weight, torch.ones(2).cuda(), torch.ones(2, device=torch.device("cuda:0"))]
        assert torch.autocast("cuda", torch.bfloat16).device == "cpu"
        assert torch.amp.GradScaler("cuda")._device == "cpu"
    assert {tensor.device.type for tensor in found} == {"cpu"}
    assert torch.autocast("cuda", enabled=False).device == "cuda"


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
    choices = ", ".join([*tools.LIMITS, "suite, "])
    assert f"'nonsense' is no part: choose from {choices}" in capsys.readouterr().err


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


def test_anchors_are_timed_beside_torch_and_compile(monkeypatch):
    """At the sizes of benchmarks.kernels; their tensors are made when a group begins."""
    monkeypatch.setattr(checking, "DRY", False)
    found = times.anchors()
    assert [name.removeprefix("anchor, ") for name in found] == [
        "rms_norm, middle, 4096 x 4096",
        "rms_norm, wide, 2048 x 32768",
        "layer_norm, wide, 2048 x 32768",
        "group_norm, SiLU, middle, 4 x 256 x 128 x 128",
        "group_norm, SiLU, wide, 16 x 256 x 128 x 128",
        "Muon, 48 matrices",
        "Muon, 48 matrices, host",
        "linear loss, 4096 x 4096 x 128256",
    ]
    *kernels, muon, _, loss = (rows for rows, _ in found.values())
    for rows in kernels:
        assert [row.name for row in rows] == ["torch", "torch.compile", "apex"]
        assert [row.over for row in rows] == [None, "torch", "torch"]
    assert [row.over for row in muon] == [None, "torch Muon.step", "FusedMuon.step"]
    assert [row.name for row in loss][1:4] == ["torch.compile", "linear_cross_entropy", "compact"]
