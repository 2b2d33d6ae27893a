"""``apex selftest`` in several processes, and what is left to ``--all``."""

import errno
import functools
import json
import multiprocessing
import os
import subprocess
import sys
from collections import deque

import pytest
import torch

from apex.catalogue.optimizers import OPTIMIZERS
from apex.commands.command_line import main
from apex.commands.selftest import command, ops, record, spread
from apex.commands.selftest.check import Result
from apex.commands.selftest.record import Record
from tests.commands.selftest import planted

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def _content(file, *words):
    """Run the command; its file without times and what is about processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main(["selftest", "--device", "cpu", "--json", str(file), *words]) == 0
    finally:
        torch.set_num_threads(threads)
    content = json.loads(file.read_text(encoding="utf-8"))
    for check in content["checks"]:
        del check["seconds"]
    return content


@pytest.mark.slow
def test_two_processes_find_what_one_finds_in_the_same_order(tmp_path):
    """It takes 5 s: two processes import torch."""
    words = ["--only", "rms norm, bf16", "--only", "FusedLion, bf16", "--processes"]
    found = [_content(tmp_path / f"{n}.json", *words, n) for n in ("0", "2")]
    assert [content["processes"] for content in found] == [0, 2]
    assert len(found[0]["checks"]) == 9
    assert found[0]["checks"] == found[1]["checks"]
    assert found[1]["complete"]
    assert found[1]["next"] is None


@pytest.mark.slow
def test_a_process_that_dies_or_takes_too_long_is_a_failed_check(tmp_path, monkeypatch, capsys):
    """It takes 12 s: four processes import torch, and one sleeps until it is ended."""
    kinds = "fine fine dies fine / sleeps fine"
    monkeypatch.setattr(command, "plan", functools.partial(planted.plan, kinds=kinds))
    monkeypatch.setitem(spread.LIMITS, "cpu", 3.0)
    file = tmp_path / "f.json"
    assert main(["selftest", "--device", "cpu", "--json", str(file), "--processes", "2"]) == 1
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["complete"]
    found = {check["name"]: check for check in content["checks"]}
    assert [*found] == [check.name for check, _ in planted.plan(kinds=kinds)]
    errors = {name: check["error"] for name, check in found.items() if check["error"]}
    killed = "its process was ended by SIGKILL; the machine may have run out of memory"
    assert errors == {"2 dies": killed, "4 sleeps": "not finished in 3 s: its process was ended"}
    process = {name: check["measured"][0]["value"] for name, check in found.items() if "f" in name}
    assert process["0 fine"] == process["1 fine"] != process["3 fine"]
    assert os.getpid() not in process.values()
    shown, told = capsys.readouterr()
    for text in (shown, told):
        assert f"RAISED  area: 2 dies (definition): {killed}" in text


@pytest.mark.slow
def test_the_run_ends_where_process_after_process_dies(monkeypatch):
    """It takes 4 s: two processes import torch."""
    monkeypatch.setattr(spread, "MOST_LOST", 2)
    plan = functools.partial(planted.plan, kinds="dies dies dies")
    assert len([*spread.spread(plan, lambda number: None, 1, 100.0)]) == 2


def test_a_process_for_each_core_that_may_be_used_and_a_gpu_has_room_for(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda of: range(6), raising=False)
    assert spread.processes_for(CPU) == 6
    sizes = {"total_memory": 5 * 2**30}
    properties = lambda device: type("Properties", (), sizes)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert spread.processes_for(CUDA) == 2
    sizes["total_memory"] = 2**20
    assert spread.processes_for(CUDA) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda of: range(64), raising=False)
    assert spread.processes_for(CPU) == spread.MOST


def test_checks_that_launch_the_same_kernels_go_to_one_process():
    planned = command.plan(CUDA, kernels=True)
    groups = spread._groups(planned)
    assert sorted(number for group in groups for number in group) == [*range(len(planned))]
    of = {}
    for number, group in enumerate(groups):
        for check, _ in (planned[one] for one in group):
            of.setdefault(f"{check.area}: {check.name}", set()).add(number)
    assert {len(numbers) for numbers in of.values()} == {1}
    for names in (
        ["norms and losses: layer norm, bf16, forward", "norms and losses: layer norm, bf16, "
         "backward", "no waits: layer norm"],
        ["optimizers: FusedAdam, L2, fp32", "CUDA graphs: FusedAdam, L2, fp32"],
        ["training: training at O2, FusedAdam", "no waits: training at O2, FusedAdam"],
    ):  # fmt: skip
        assert len(set.union(*(of[name] for name in names))) == 1


def test_all_has_more_variants_and_a_name_finds_each():
    names = [
        {f"{check.area}: {check.name}" for check, _ in command.plan(CUDA, kernels=True, **options)}
        for options in ({"everything": False}, {}, {"everything": False, "only": ["sgd, nest"]})
    ]
    usual, every, named = names
    assert usual < every
    assert named == {
        f"{area}: FusedSGD, Nesterov, fp32" for area in ("optimizers", "no waits", "CUDA graphs")
    }
    assert not named & usual
    for entry in OPTIMIZERS:
        assert (
            f"optimizers: {entry.called(entry.variants[0])}, {entry.variants[0].dtypes[0]}" in usual
        )
    for op in ops.CHECKED:
        assert f"norms and losses: {op.title}, {op.dtypes[-1]}, backward" in usual


def test_the_file_has_results_in_the_order_of_the_plan(tmp_path):
    planned = planted.plan(kinds="fine fine fine")
    record = Record(planned, {}, tmp_path / "f.json")
    for number in range(3):
        record.begin(number)
    for number in (2, 0):
        check = planned[number][0]
        record.end(number, Result(check.area, check.name, "definition", (), 0.0, None, ()))
    record.save()
    content = json.loads((tmp_path / "f.json").read_text(encoding="utf-8"))
    assert [check["name"] for check in content["checks"]] == ["0 fine", "2 fine"]
    assert content["next"] == "1 fine (definition)"
    assert not content["complete"]


def test_a_disk_that_is_full_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def full(content, file):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "f.json"
    monkeypatch.setattr(record, "save", full)
    monkeypatch.setattr(command, "plan", functools.partial(planted.plan, kinds="fine fine"))
    assert main(["selftest", "--device", "cpu", "--json", str(file), "--processes", "0"]) == 1
    shown, told = capsys.readouterr()
    assert "2 checks in " in shown
    assert f"Results NOT saved: {file} cannot be written (No space left on device)." in shown
    assert told.count("cannot be written") == 1


@pytest.mark.slow
def test_a_program_without_an_importable_main_module_can_call_it(tmp_path):
    """It takes 5 s: two processes import torch."""
    program = (
        "from apex.commands.selftest import spread\n"
        "from tests.commands.selftest import planted\n"
        "from functools import partial\n"
        "plan = partial(planted.plan, kinds='fine')\n"
        "found = [*spread.spread(plan, lambda number: None, 1, 100.0)]\n"
        "assert [result.error for _, result in found] == [None], found\n"
    )
    paths = os.pathsep.join([os.getcwd(), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    call = functools.partial(subprocess.run, check=True, env=environment, cwd=tmp_path)
    call([sys.executable, "-"], input=program.encode())  # ./<stdin> is no file


def test_the_time_that_a_process_was_given_is_said():
    worker = spread._Worker.__new__(spread._Worker)
    worker.pipe, theirs = multiprocessing.Pipe()
    worker.number, worker._left, worker._given = None, deque([0]), 0.0
    planned = planted.plan(kinds="fine")
    worker.give(deque(), lambda number: None)
    assert "not finished in 300 s" in worker.answer(planned, 7.0).result.error
    theirs.send(None)
    assert worker.answer(planned, 7.0) is None
    assert "not finished in 7 s" in worker.answer(planned, 7.0).result.error
    worker.pipe.close()
    theirs.close()
