"""``apex bench``: is lower precision worth it, on my model, on my machine?

The levels of each task, batch size and seed are trained by turns (`turns`) in a process of their
own (`plan`, `worker`). `verdict` compares them, `sentences` says which to take, and the report is
written as text, tables, a page and pictures.
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from apex.commands.bench.training import plan, report, tasks
from apex.commands.bench.training.notes import LEFT_OUT, how_measured
from apex.commands.bench.training.precision import ALIASES, LEVELS
from apex.commands.bench.training.results import Cell, Results, write
from apex.commands.bench.training.sentences import TASK, why_not_native
from apex.commands.bench.training.tasks.task import TaskOptions
from apex.commands.bench.training.trainer import OPTIMIZERS
from apex.commands.bench.training.warned import Warned, each_once
from apex.commands.command_line import UsageError
from apex.commands.options import (
    add_device,
    at_least,
    check_file,
    check_folder,
    environment,
    pick_device,
    positive,
    terminated_like_interrupted,
    unique,
)
from apex.commands.progress import Bar, progress

__all__ = ["HELP", "add_arguments", "run"]

HELP = (
    "Train a task at each precision level, batch size and seed, and report what each level costs "
    "and gains on this machine: an answer, a table, a page for the browser, JSON and CSV."
)
BATCH = 128
MARGIN = 0.5
SEEDS, QUICK_SEEDS = 3, 6
DEFAULT_LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "native-fp16", "native-bf16")
OK, FAILED, INTERRUPTED = 0, 1, 130  # exit codes
TRAINED = "{task.completed:.1f} of {task.total} trainings"  # beside the progress bar
FIRST = 1.5  # times the share of a later seed
FOR_THE_REST = 0.12  # of a budget: plots and page
PLOTS_S = 6.0  # that they take: 5 to 7 s on one core of a Xeon, whatever was trained


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``apex bench``."""
    named = "; ".join(f"{name}: {summary}" for name, (_, summary) in tasks.TASKS.items())
    add = parser.add_argument
    add("--task", nargs="+", default=[TASK], metavar="TASK",
        help=f"{named}; or file.py:function, see the docs (default: {TASK})")
    add("--levels", nargs="+", choices=[*LEVELS, *ALIASES], metavar="LEVEL",
        help="O0 to O5, native-fp16 and native-bf16 (torch.autocast), FP16 (FP16_Optimizer, static "
            "scale); FP32 is O0 and amp is O1 (default: all except FP16; also except native-fp16 "
            "if the device has no float16 arithmetic)")
    add("--batch", nargs="+", type=at_least(1), default=[BATCH], metavar="N",
        help=f"samples per step (default: {BATCH})")
    add("--seeds", type=at_least(1), metavar="N",
        help=f"train each level with N seeds; intervals need at least 3 (default: {SEEDS}, and "
            f"{QUICK_SEEDS} with --quick)")
    add("--budget", type=_seconds, metavar="TIME",
        help="time limit, such as 90s, 10m or 2h; apex stops slow levels and shortens trainings to "
            "keep it")
    add("--margin", type=positive, default=MARGIN, metavar="POINTS",
        help="points of accuracy that a level may lose; apex allows at least three test samples "
            "(default: %(default)s)")
    add("--target", type=_share, metavar="PERCENT", help="report the time to this accuracy")
    add("--epochs", type=at_least(1), metavar="N",
        help="passes through the data (default: the task's)")
    add("--optimizer", choices=list(OPTIMIZERS), metavar="NAME",
        help=f"one of {' '.join(OPTIMIZERS)}; lower-case names are torch's (default: the task's)")
    add("--lr", type=positive, help="learning rate (default: the task's)")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--tf32", choices=["on", "off", "both"],
        help="TF32 for float32 products, on a GPU that has it; O0 always runs both (default: off)")
    add("--quick", action="store_true", help="use less data; all output is marked as quick")
    add("--data", type=Path, metavar="FOLDER", help="folder with the data of the task")
    add_device(parser)
    add("--out", type=Path, default=Path("apex-bench"), metavar="FOLDER",
        help="folder for all files; apex continues a stopped run that it finds in it (default: "
            "%(default)s)")
    add("--fresh", action="store_true", help="train all levels again, even if --out has results")
# fmt: on


def run(args: argparse.Namespace) -> int:
    """Carry out ``apex bench``.

    Returns:
        0, or 1 if a cell failed, diverged or ran out of memory, or 130 if the run was interrupted;
        what was finished until then is shown and kept.

    Raises:
        UsageError: An option asks for what cannot be done, and nothing was trained; or files
            could not be written, or a task's file was changed, meanwhile.
    """
    warned = Warned(_warn)
    with terminated_like_interrupted(), each_once(warned):
        bench = _Bench(args, warned)
        try:
            with suppress(KeyboardInterrupt):  # the report says that it is incomplete
                bench.run_all()
            finished = bench.report
            report.show(finished, args.out)
        except BrokenPipeError:  # of standard output
            raise
        except OSError as error:
            raise UsageError(
                f"--out {args.out}: {error}; apex kept the files that it wrote before"
            ) from error
    if not finished.complete:
        return INTERRUPTED
    return OK if all(run.status in ("ok", "stopped") for run in finished.runs) else FAILED


class _Bench:
    """All that the options ask for, and what has been measured so far."""

    def __init__(self, args: argparse.Namespace, warned: Warned) -> None:
        self._began, self._warned = time.monotonic(), warned
        self._least_s = 0.0  # that a group takes at least, once one has taken more than its share
        device = pick_device(args.device)
        self._options = TaskOptions(device, args.quick, args.data)
        batches = unique(args.batch)
        here = environment(device)
        slow = why_not_native(here, "fp16")  # it takes six times O0's time
        default = [name for name in DEFAULT_LEVELS if not (slow and name == "native-fp16")]
        levels = _levels(args.levels or default, args.tf32, device)
        described = [_described(name, args, self._options, batches) for name in unique(args.task)]
        ways = {"compile": args.compile, "quick": args.quick}
        cells = tuple(
            Cell(level=level, tf32=tf32, batch=batch, seed=seed, **task, **ways)
            for seed in range(args.seeds or (QUICK_SEEDS if args.quick else SEEDS))
            for task in described
            for batch in batches
            for level, tf32 in levels
        )
        self._file = args.out / "results.json"
        check_folder("--out", args.out / "cells")
        check_file("--out", self._file)
        self._store = plan.Store(args.out / "cells", {**here, "budget": args.budget}, self._options)
        if args.fresh:
            self._store.forget(cells)
        self.report = Results(
            environment=here,
            plan=cells,
            runs=(),
            margin=args.margin,
            target=args.target,
            budget_s=args.budget,
            notes=how_measured(device) | ({LEFT_OUT: slow} if slow and not args.levels else {}),
        )

    def run_all(self) -> None:
        groups = plan.groups(self.report.plan)
        with progress(len(self.report.plan), TRAINED) as bar:
            device = self._options.device
            if device.type == "cuda":  # events are recorded on the current one
                torch.cuda.set_device(device.index or 0)
            for place, group in enumerate(groups):
                if place and self._left() < self._least_s:
                    self._leave_out([cell for group in groups[place:] for cell in group], bar)
                    break
                self._train(group, len(groups) - place, bar)

    def _left(self) -> float:
        """Seconds of the budget that trainings may still take."""
        budget = self.report.budget_s
        if budget is None:
            return float("inf")
        rest = max(FOR_THE_REST * budget, min(PLOTS_S, budget / 2))
        return budget - rest - (time.monotonic() - self._began)

    def _share(self, seed: int, groups_left: int) -> float:
        """Seconds of the budget for the next group; at the first seed memory is measured, too."""
        share = (FIRST if seed == 0 else 1.0) / groups_left
        return max(1.0, self._left() * min(1.0, share))

    def _leave_out(self, cells: Sequence[Cell], bar: Bar) -> None:
        """Take trainings out of the plan: what cannot be cut any further would not fit."""
        bar.print(f"The time budget is too short for the last {len(cells)} trainings.")
        left_out = {*cells}
        plan = tuple(cell for cell in self.report.plan if cell not in left_out)
        self._update(plan=plan, left_out=len(left_out))

    def _train(self, group: Sequence[Cell], groups_left: int, bar: Bar) -> None:
        cell = group[0]
        name = f"{cell.task}, batch {cell.batch}, seed {cell.seed}"
        bar.describe(name)
        kept, ended = self._store.get(group), "kept from an earlier run"
        if kept is None:
            begin = time.monotonic()
            budget = None if self.report.budget_s is None else self._share(cell.seed, groups_left)

            def on_progress(share: float, line: str | None, place: str | None = None) -> None:
                bar.update(share * len(group))
                if line and place:
                    self._warned(place, line)
                elif line:
                    bar.print(line)

            runs = plan.run_group(group, self._options, on_progress, budget)
            kept = plan.Kept(tuple(runs), time.monotonic() - begin)
            if budget is not None and kept.seconds > budget:
                self._least_s = _uncut(kept)
            self._store.put(group, kept)
            troubled = [run for run in runs if run.status != "ok"]
            each = [f"{run.cell.label} {run.error or run.status}" for run in troubled]
            ended = "; ".join(each) or "ok"
        bar.finish(f"{name}: {ended}", len(group))
        self._update(
            runs=(*self.report.runs, *kept.runs), seconds=self.report.seconds + kept.seconds
        )

    def _update(self, **changes: Any) -> None:
        self.report = replace(self.report, **changes)
        write(self.report, self._file)


def _uncut(kept: plan.Kept) -> float:
    """Seconds of a group that no budget can cut: without the steps after the first turns."""
    later = [run.step_ms[run.blocks[1] :] for run in kept.runs if len(run.blocks) > 1]
    return kept.seconds - sum(map(sum, later)) / 1000


def _warn(place: str, text: str) -> None:
    print(f"{place}: {text}", file=sys.stderr)


# --- what the options mean -----------------------------------------------------------------------


def _levels(
    asked: Sequence[str], tf32: str | None, device: torch.device
) -> list[tuple[str, bool | None]]:
    names = unique(ALIASES.get(name, name) for name in asked)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        if tf32 is not None:
            raise UsageError(f"--tf32 {tf32}: {device} has no TF32; leave the option out")
        return [(name, None) for name in names]
    ways = {"on": [True], "off": [False], "both": [False, True], None: [False]}[tf32]
    return [(name, way) for name in names for way in ([False, True] if name == "O0" else ways)]


def _described(
    name: str, args: argparse.Namespace, options: TaskOptions, batches: Sequence[int]
) -> dict[str, Any]:
    """Load a task once, so that its mistakes are reported now, and ask for its defaults.

    It is asked for a batch of each size, too: it knows which are too large.
    """
    task = tasks.load(name, options)
    optimizer = args.optimizer or task.optimizer
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise UsageError(f"task {name}: its optimizer is {optimizer!r}; use one of {known}")
    if task.epochs < 1 or not (task.lr is None or 0 < task.lr < float("inf")):
        raise UsageError(
            f"task {name}: epochs is {task.epochs} and lr is {task.lr}; epochs must be 1 or more, "
            "and lr above 0 or None"
        )
    for size in batches:
        try:
            first = next(iter(task.loader(size, 0)), None)
        except UsageError:
            raise
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            raise UsageError(f"task {name}: loader({size}, 0) raised {raised}") from error
        if first is None:
            raise UsageError(f"--batch {size}: {name} has fewer samples; use a smaller batch")
    own = task.lr if optimizer == task.optimizer else None
    return {
        "task": name,
        "optimizer": optimizer,
        "lr": args.lr or own or OPTIMIZERS[optimizer]["lr"],
        "epochs": args.epochs or task.epochs,
    }


def _share(text: str) -> float:
    if positive(text) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is more than 100 %")
    return float(text)


def _seconds(text: str) -> float:
    """Read a time such as 90s or 10m."""
    found = re.fullmatch(r"([\d.]+)([smh]?)", text)
    with suppress(argparse.ArgumentTypeError):
        if found:
            return positive(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]
    raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 10m or 2h")
