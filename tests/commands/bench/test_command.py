"""`apex bench` as a command: what is kept when something is killed, what fits, what is refused."""

import contextlib
import errno
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from apex.commands.bench.training import command, plan, plots, results
from apex.commands.bench.training.tasks.task import TaskOptions
from apex.commands.command_line import UsageError, main
from tests.commands import ENDED_BY_CTRL_C
from tests.commands.bench import made

TASKS = Path(__file__).with_name("user_task.py")


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """What is kept is used again, however busy the machine of the tests is."""
    monkeypatch.setattr(plan, "BUSY", 2.0)


@pytest.fixture
def log(tmp_path, monkeypatch):
    file = tmp_path / "log"
    file.touch()
    monkeypatch.setenv("USER_TASK_LOG", str(file))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(plots, "draw", lambda *_: {})  # seconds too; the pictures have own tests
    return file


def bench(out, task, *options):
    words = ["--task", f"{TASKS}:{task}", "--device", "cpu", "--batch", "8", "--out", str(out)]
    return main(["bench", *words, *options])


def slow(tmp_path):
    """The command line of three groups of a second each, in which they sleep."""
    words = ["bench", "--task", f"{TASKS}:slow", "--device", "cpu", "--levels", "O0", "--batch"]
    return [*words, "8", "--seeds", "3", "--epochs", "1", "--out", str(tmp_path / "out")]


def read(out):
    return results.read(out / "results.json")


def processes(log, parent=None):
    """The processes that trained, in order, each once; the parent looks at data alone."""
    return [
        pid for pid in dict.fromkeys(log.read_text().split()) if pid != str(parent or os.getpid())
    ]


def test_the_levels_of_a_seed_share_a_process_and_are_trained_once(tmp_path, log):
    options = ("--levels", "O0", "O4", "--seeds", "2")
    assert bench(tmp_path, "build", *options) == 0
    report = read(tmp_path)
    found = [(run.cell.seed, run.cell.level) for run in report.runs]
    assert found == [(0, "O0"), (0, "O4"), (1, "O0"), (1, "O4")]
    assert len(processes(log)) == 2
    for run in report.runs:
        assert (run.status, run.together, len(run.losses)) == ("ok", ("O0", "O4"), 16)
        assert (run.peak_bytes or 0) > 0 or run.cell.seed
    before = log.read_text()
    assert bench(tmp_path, "build", *options) == 0  # all is there: nothing is trained
    assert log.read_text().count("\n") - before.count("\n") <= 1  # the look at the first batch
    assert read(tmp_path).runs == report.runs
    assert bench(tmp_path, "build", *options, "--fresh") == 0
    assert len(processes(log)) == 4


@pytest.mark.slow
def test_a_models_own_warning_is_shown_once(tmp_path, log, capsys):
    assert bench(tmp_path, "warning", "--levels", "O0", "O2", "--seeds", "2") == 0
    errors = capsys.readouterr().err
    assert len(processes(log)) == 2
    assert errors.count("UserWarning: the model is old") == 1
    assert errors.count("UserWarning: weights of torch.float") == 1


def test_a_budget_leaves_seeds_out_that_cannot_be_cut_any_further(
    tmp_path, log, capsys, monkeypatch
):
    """A group takes 20 s whatever it is given; of 60 s some are for plots, and two fit."""
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])

    def run_group(group, options, on_progress, budget_s):
        now[0] += 20.0
        return [made.run(cell) for cell in group]

    monkeypatch.setattr(plan, "run_group", run_group)
    options = ("--levels", "O0", "O4", "--seeds", "5", "--budget", "60s")
    assert bench(tmp_path, "build", *options) == 0
    assert now[0] == 40.0
    report = read(tmp_path)
    assert (len(report.runs), report.left_out, report.complete) == (4, 6, True)
    shown = capsys.readouterr().out
    assert "CUT to 60 s: no time for 6 more trainings (the last seeds)" in shown
    assert shown.startswith("No answer: the time budget left no time for more than 2 of the seeds")


def test_a_seed_that_took_too_long_leaves_none_out_that_can_be_cut(tmp_path, log, monkeypatch):
    """The first group takes 20 s, 16 of them in 2 x 8 steps that the budget of others can cut."""
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])

    def run_group(group, options, on_progress, budget_s):
        assert budget_s == pytest.approx(52.8 / 5 * 1.5 if not now[0] else budget_s)  # the first
        now[0] += max(4.0, budget_s) if now[0] else 20.0
        steps = {"step_ms": (1000.0,) * 12, "losses": (1.0,) * 12, "blocks": (0, 4)}
        return [made.without(made.run(cell), **steps) for cell in group]

    monkeypatch.setattr(plan, "run_group", run_group)
    assert bench(tmp_path, "build", "--levels", "O0", "O4", "--seeds", "5", "--budget", "60s") == 0
    assert len(read(tmp_path).runs) == 10
    assert now[0] <= 60.0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_a_matrix_that_was_killed_goes_on_and_leaves_no_process(tmp_path, log, capsys):
    """It takes 5 s, as the next one: the command and its fork server each import torch."""
    words = slow(tmp_path)
    process = subprocess.Popen([sys.executable, "-m", "apex", *words], env=dict(os.environ))
    cells = tmp_path / "out" / "cells"
    wait(lambda: cells.is_dir() and len(list(cells.glob("*.json"))) == 1)
    wait(lambda: len(processes(log, process.pid)) == 2)  # the second has begun
    process.kill()
    process.wait()
    wait(lambda: not any(alive(pid) for pid in processes(log)))
    assert len(list(cells.glob("*.json"))) == 1
    log.write_text("")
    capsys.readouterr()
    assert main(words) == 0
    said = " ".join(capsys.readouterr().err.split())  # a long path of the task wraps its line
    assert said.count("kept from an earlier run") == 1
    assert "seed 0: kept from an earlier run" in said
    assert len(read(tmp_path / "out").runs) == 3
    assert len(processes(log)) == 2  # the first was kept


@pytest.mark.skipif(sys.platform != "linux", reason="sends SIGINT to a group of processes")
@pytest.mark.slow
def test_ctrl_c_leaves_a_partial_report(tmp_path, log):
    words = slow(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "apex", *words],
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    cells = tmp_path / "out" / "cells"
    wait(lambda: cells.is_dir() and len(list(cells.glob("*.json"))) == 1)
    wait(lambda: len(processes(log, process.pid)) == 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to parent and child
    out, errors = process.communicate(timeout=300)
    assert process.returncode in ENDED_BY_CTRL_C
    assert "INCOMPLETE: 1 of 3" in out
    assert "Traceback" not in out + errors
    report = read(tmp_path / "out")
    assert [run.status for run in report.runs] == ["ok"]
    assert not report.complete
    assert (tmp_path / "out" / "report.html").exists()
    assert not any(alive(pid) for pid in processes(log))


@pytest.mark.slow
def test_what_goes_wrong_in_a_cell_is_recorded_and_the_rest_goes_on(tmp_path, log, capsys):
    assert bench(tmp_path, "troubled", "--levels", "O0", "--seeds", "5") == 1
    report = read(tmp_path)
    assert report.complete
    statuses = ["failed", "out of memory", "diverged", "failed", "ok"]
    assert [run.status for run in report.runs] == statuses
    errors = [run.error or "" for run in report.runs]
    assert "SIGKILL" in errors[0]
    assert "Tried to allocate" in errors[1]
    assert errors[2] == errors[4] == ""
    assert "a mistake" in errors[3]
    out = capsys.readouterr().out
    assert all(status in out for status in statuses[:3])
    before = len(processes(log))
    assert bench(tmp_path, "troubled", "--levels", "O0", "--seeds", "5") == 1
    assert len(processes(log)) == before + 2  # those that failed are tried again


@pytest.mark.slow
def test_a_loader_may_have_processes(tmp_path, log):
    assert bench(tmp_path, "loaded", "--levels", "O0", "--seeds", "1", "--lr", "1e-6") == 0
    (run,) = read(tmp_path).runs
    assert run.steps_per_epoch == 4
    assert {*log.read_text().split()} == {multiprocessing.get_start_method()}


def test_levels_that_do_not_fit_together_are_trained_beside_o0_or_alone(monkeypatch):
    """What a process without memory says of all is tried again with fewer."""
    tried = []

    def together(cells, options, on_progress, budget_s):
        labels = tuple(cell.level for cell in cells)
        tried.append(labels)
        large = {"O0": 2, "O1": 1, "O2": 3, "O4": 9}
        short = sum(large[level] for level in labels) > 4
        status = "out of memory" if short else "ok"
        return [results.Run(cell, status, together=labels) for cell in cells]

    monkeypatch.setattr(plan, "_together", together)
    cells = [made.cell(level) for level in ("O0", "O1", "O2", "O4")]
    runs = plan.run_group(cells, None, lambda *words: None, None)
    found = {(run.cell.level, run.together): run.status for run in runs}
    assert found["O1", ("O0", "O1")] == found["O0", ("O0", "O1")] == found["O0", ("O0",)] == "ok"
    assert found["O2", ("O2",)] == "ok"
    assert found["O4", ("O4",)] == "out of memory"
    assert tried[0] == ("O0", "O1", "O2", "O4")
    assert {run.cell for run in runs} == set(cells)


@pytest.mark.parametrize(
    ("tf32", "others"), [(None, [False]), ("off", [False]), ("on", [True]), ("both", [False, True])]
)
def test_where_a_gpu_has_tf32_o0_is_trained_with_and_without_it(monkeypatch, tf32, others):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    found = command._levels(["O0", "O4"], tf32, device)
    assert found == [("O0", False), ("O0", True), *(("O4", way) for way in others)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert command._levels(["O0", "O4"], None, device) == [("O0", None), ("O4", None)]


def test_what_is_kept_depends_on_the_text_of_a_task_and_on_its_data(tmp_path, monkeypatch):
    (tmp_path / "attempt.py").write_text("x = 1")
    monkeypatch.chdir(tmp_path)
    group = (made.cell(task="attempt.py:f"),)
    kept = plan.Kept((results.Run(group[0], "ok", losses=(math.nan, 1.0)),), 1.5)

    def store(data=None, **environment):
        options = TaskOptions(torch.device("cpu"), data=data)
        return plan.Store(tmp_path / "cells", environment, options)

    former = store()
    former.put(group, kept)
    assert store().get(group).seconds == 1.5
    assert store(date="tomorrow").get(group) is not None
    assert store(threads=3).get(group) is store(Path("data")).get(group) is None
    (tmp_path / "attempt.py").write_text("x = 2")
    assert store().get(group) is None
    with pytest.raises(UsageError, match="attempt.py was changed while attempt.py:f was trained"):
        former.put(group, kept)


@pytest.mark.parametrize(("waited", "is_kept"), [(0.05, True), (0.3, False)])
def test_what_other_programs_disturbed_is_trained_again(waited, is_kept, tmp_path, monkeypatch):
    """So the same command measures again once they are closed."""
    monkeypatch.setattr(plan, "BUSY", results.BUSY)
    group = (made.cell("O0"), made.cell("O4"))
    runs = tuple(made.run(of, waited=waited) for of in group)
    store = plan.Store(tmp_path / "cells", {}, TaskOptions(torch.device("cpu")))
    store.put(group, plan.Kept(runs, 1.5))
    assert (store.get(group) is not None) is is_kept
    assert (made.report(group, runs).busy is None) is is_kept


def test_a_damaged_file_counts_as_none(tmp_path):
    group = (made.cell(),)
    store = plan.Store(tmp_path, {}, TaskOptions(torch.device("cpu")))
    store.put(group, plan.Kept((results.Run(group[0], "ok", host_ms=1.5),), 2.0))
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    assert store.get(group) is not None
    for damaged in (whole[:100], "[" * 100_000, "[]", whole.replace("1.5", '"x"'), "\0"):
        file.write_text(damaged)
        assert store.get(group) is None


@pytest.mark.parametrize("name", ["cells", "results.json"])
def test_an_out_folder_that_cannot_take_a_file_is_said_before_the_training(
    tmp_path, log, capsys, name
):
    if name == "cells":
        (tmp_path / name).touch()
    else:
        (tmp_path / name).mkdir()
    assert bench(tmp_path, "build") == 2
    assert name in capsys.readouterr().err
    assert processes(log) == []


def test_a_full_disk_is_one_line(tmp_path, log, capsys, monkeypatch):
    def full(content, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plan, "save", full)
    assert bench(tmp_path, "build", "--levels", "O0") == 2
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "no-such"], "no-such"),
        (["--task", f"{TASKS}:nothing"], "nothing"),
        (["--task", f"{TASKS}:broken"], "no such data anywhere"),
        (["--task", f"{TASKS}:incomplete"], "loader"),
        (["--task", "/no/such/file.py:build"], "/no/such/file.py"),
        (["--task", f"{TASKS}:refusing"], "raised ValueError: no such size"),
        (["--task", f"{TASKS}:unknown"], "'lion'"),
        (["--task", f"{TASKS}:no_epoch"], "epochs is 0"),
        (["--batch", "max"], "--batch"),
        (["--batch", "0"], "--batch"),
        (["--batch", "1000000"], "--batch 1000000"),
        (["--levels", "O7"], "--levels O7 is unknown: use O0, O1, O2, "),
        (["--tf32", "both", "--device", "cpu"], "TF32"),
        (["--lr", "-1"], "--lr"),
        (["--seeds", "0"], "--seeds"),
        (["--budget", "soon"], "90s, 10m or 2h"),
        (["--target", "150"], "more than 100 %"),
        (["--margin", "0"], "--margin"),
        (["--optimizer", "Adam"], "--optimizer Adam is unknown: did you mean 'adam'? (see 'apex"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--out", "/proc/nothing"], "--out"),
    ],
)
def test_bad_requests_are_one_line_and_train_nothing(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):
        assert main(["bench", "--quick", *words]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert len(errors.replace(str(TASKS.parent), "")) < 250  # wherever the checkout is
    assert said in errors
    assert not list(tmp_path.iterdir())


def wait(done, seconds=60):
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def alive(pid):
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        status = Path("/proc", pid, "stat").read_text()
    except OSError:
        return False
    return int(pid) != os.getpid() and status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("native", [True, False])
def test_a_float16_that_the_device_does_not_compute_is_left_out_by_default(
    native, tmp_path, log, capsys, monkeypatch
):
    """It takes six times as long as all others; asked for, it is trained."""
    half = {"dtype": "float16", "native": native, "why": "no such instructions"}
    here = {**made.CPU, "device": {**made.CPU["device"], "half_types": [half]}}
    monkeypatch.setattr(command, "environment", lambda device: here)
    monkeypatch.setattr(plan, "run_group", lambda group, *_: [made.run(cell) for cell in group])
    said = "native-fp16 was not trained: this CPU has no float16 arithmetic"
    assert bench(tmp_path / "default", "build", "--quick") == 0
    shown, runs = " ".join(capsys.readouterr().out.split()), read(tmp_path / "default").runs
    levels = {run.cell.level for run in runs}
    assert {"O1", "native-bf16"} <= levels
    assert ("native-fp16" in levels, said in shown) == (native, not native)
    assert {run.cell.seed for run in runs} == set(range(6))  # of a quick run
    assert "- O1 " not in shown  # of a quick run the page alone has a sentence for each level
    assert bench(tmp_path / "asked", "build", "--levels", "O0", "native-fp16") == 0
    shown, runs = " ".join(capsys.readouterr().out.split()), read(tmp_path / "asked").runs
    assert {(run.cell.level, run.cell.seed) for run in runs} == {
        (name, seed) for name in ("O0", "native-fp16") for seed in range(3)
    }
    assert said not in shown
    assert "- native-fp16 " in shown
