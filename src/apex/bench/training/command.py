"""``apex bench``: is lower precision worth it, on my model, on my machine?

The command. A task is trained at every level, batch size and seed (`matrix`), each time measured
(`cell`) in a process of its own (`worker`); rows and verdicts are made of the runs, and shown as a
table, a page and pictures. Tasks are in `apex.bench.training.tasks`.
"""

import argparse
import importlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from apex.bench.cli import UsageError
from apex.bench.options import (
    at_least,
    check_file,
    check_folder,
    environment,
    pick_device,
    terminated_like_interrupted,
    unique,
)
from apex.bench.output.progress import Trainings, progress
from apex.bench.training import cell as cells
from apex.bench.training import matrix, report, tasks, tensorboard
from apex.bench.training.ceilings import ceilings
from apex.bench.training.largest import largest
from apex.bench.training.optimizers import OPTIMIZERS
from apex.bench.training.precision import ALIASES, LEVELS
from apex.bench.training.results import Cell, Report, Run, write
from apex.bench.training.tasks.task import TaskOptions
from apex.bench.training.verdict import verdicts

__all__ = ["HELP", "add_arguments", "run"]

HELP = (
    "Train a task at each precision level, batch size and seed, then say what each level costs and "
    "gives on this machine: a table, comparisons, a page for the browser, plots, JSON and CSV."
)
BATCH = 128
DEFAULT_LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
OK, FAILED, INTERRUPTED = 0, 1, 130  # exit codes
TRAINED = "{task.completed:.1f} of {task.total} trainings"  # beside the progress bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``apex bench``."""
    named = "; ".join(f"{name}: {task.summary}" for name, task in tasks.TASKS.items())
    parser.add_argument(
        "--task", nargs="+", default=["digits-cnn"], metavar="TASK",
        help=f"{named}; or file.py:function, see docs (default: digits-cnn)",
    )  # fmt: skip
    parser.add_argument(
        "--levels", nargs="+", choices=[*LEVELS, *ALIASES], default=list(DEFAULT_LEVELS),
        metavar="LEVEL",
        help="O0 to O5, native-fp16 and native-bf16 (torch.autocast), FP16 (FP16_Optimizer, static "
        "scale); FP32 is O0 and amp is O1 (default: O0 to O5)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", nargs="+", type=_batch, default=[BATCH], metavar="N",
        help=f"samples per step; max finds the largest that fits (default: {BATCH})",
    )  # fmt: skip
    parser.add_argument(
        "--memory-limit", type=_bytes, metavar="SIZE",
        help="memory a training may take with --batch max, such as 2GiB; required on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=at_least(1), default=3, metavar="N",
        help="train all with N seeds; below 3 levels are not compared (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--epochs",
        type=at_least(1),
        metavar="N",
        help="passes through the data (default: the task's)",
    )
    parser.add_argument(
        "--optimizer", choices=list(OPTIMIZERS), metavar="NAME",
        help=f"which of {' '.join(OPTIMIZERS)}; lower case is torch's (default: the task's)",
    )  # fmt: skip
    parser.add_argument("--lr", type=_positive, help="learning rate (default: the task's)")
    parser.add_argument(
        "--compile", action="store_true", help="compile the model with torch.compile"
    )
    parser.add_argument(
        "--tf32", choices=["on", "off", "both"],
        help="TF32 for float32 products, on a GPU that has it; O0 always runs both (default: off)",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help="less data, and one process for all trainings of a level; marked in all output",
    )  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="files of the task")
    parser.add_argument(
        "--download", action="store_true", help="let the task fetch its files into --data"
    )
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:N (default: cuda if there is one, else cpu)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("apex-bench"), metavar="FOLDER",
        help="folder of all files; a run that was stopped goes on there (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--fresh", action="store_true", help="train all again, even if --out has it already"
    )
    parser.add_argument(
        "--tensorboard", type=Path, metavar="FOLDER", help="write the curves for TensorBoard too"
    )


def run(args: argparse.Namespace) -> int:
    """Carry out ``apex bench``.

    Returns:
        0, or 1 if a cell failed, diverged or ran out of memory, or a search failed, or 130 if the
        run was interrupted; what was finished until then is shown and kept.

    Raises:
        UsageError: An option asks for what cannot be done, and nothing was trained; or files
            could not be written, or a task's file was changed, meanwhile.
        ModuleNotFoundError: A package of the ``bench`` extra is missing; nothing was trained.
    """
    for package in ("jinja2", "matplotlib", "rich", "scipy", "sklearn"):  # now, not after minutes
        importlib.import_module(package)
    if args.tensorboard is not None:
        tensorboard.check(args.tensorboard)
    bench = _Bench(args)
    with terminated_like_interrupted():
        try:
            with suppress(KeyboardInterrupt):  # the report says by itself that it is incomplete
                bench.run_all()
            finished = bench.report()
            report.show(finished, verdicts(finished), args.out)
            if args.tensorboard is not None:
                tensorboard.write(finished, args.tensorboard)
        except BrokenPipeError:  # of standard output
            raise
        except OSError as error:
            raise UsageError(
                f"--out {args.out}: {error}; what was written before is kept"
            ) from error
    if not (finished.complete and bench.searched):
        return INTERRUPTED
    well = all(run.status == "ok" for run in finished.runs)
    return OK if well and all(found["error"] is None for found in finished.largest) else FAILED


class _Bench:
    """All that the options ask for, and what has come of it so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        device = pick_device(args.device)
        self._options = TaskOptions(device, args.quick, args.data, args.download)
        self._limit: int | None = args.memory_limit
        batches: list[int] = unique(size for size in args.batch if size is not MAX)
        self.searched = MAX not in args.batch
        if not self.searched and self._limit is None and device.type == "cpu":
            raise UsageError("--batch max: needs --memory-limit on a CPU, for instance 2GiB")
        if self.searched and self._limit is not None:
            raise UsageError("--memory-limit: works only with --batch max")
        levels = _levels(args.levels, args.tf32, device)
        described = [_described(name, args, self._options) for name in unique(args.task)]
        for task, loads in described:
            _check_batches(task["task"], loads, batches)
        kinds = [task for task, _ in described]
        ways = {"compile": args.compile, "quick": args.quick}
        self._plan = matrix.plan(kinds, levels, batches, args.seeds, **ways)
        self._search = () if self.searched else matrix.plan(kinds, levels, [1], 1, **ways)
        self._file = args.out / "results.json"
        check_folder("--out", args.out / "cells")
        check_file("--out", self._file)
        self._environment = environment(device)
        self._store = matrix.Store(args.out / "cells", self._environment, self._options)
        if args.fresh:
            self._store.forget(self._plan)
        self._runs: list[Run] = []
        self._largest: list[dict[str, Any]] = []
        self._ceilings: dict[str, float] = {}

    def report(self) -> Report:
        return Report(
            environment=self._environment,
            plan=self._plan,
            runs=tuple(self._runs),
            notes=cells.how_measured(self._options.device),
            largest=tuple(self._largest),
            ceilings=self._ceilings,
        )

    def run_all(self) -> None:
        total = len(self._plan) + len(self._search)
        with progress(Trainings, total, TRAINED) as bar:
            device = self._options.device
            if device.type == "cuda":
                torch.cuda.set_device(device.index or 0)  # events are recorded on the current one
            self._ceilings = ceilings(device)

            def ended(run: Run) -> None:
                self._runs.append(run)
                write(self.report(), self._file)
                bar.ended(run)

            matrix.run_all(self._plan, self._options, self._store, bar.begun, bar.told, ended)
            for cell in self._search:
                self._find_largest(cell, bar)
            self.searched = True

    def _find_largest(self, cell: Cell, bar: Trainings) -> None:
        limit = self._limit
        if limit is None:  # a GPU: all of it
            limit = torch.cuda.get_device_properties(self._options.device).total_memory
        batch, error = largest(cell, self._options, limit, lambda size: bar.tried(cell, size))
        self._largest.append(
            {
                "task": cell.task,
                "level": cell.label,
                "batch": batch,
                "limit_bytes": limit,
                "error": error,
            }
        )
        bar.found(cell, batch)
        write(self.report(), self._file)


# --- what the options mean -----------------------------------------------------------------------

MAX = -1  # --batch max


def _levels(
    asked: Sequence[str], tf32: str | None, device: torch.device
) -> list[tuple[str, bool | None]]:
    names = unique(ALIASES.get(name, name) for name in asked)
    if not matrix.tf32_of(device):
        if tf32 is not None:
            raise UsageError(f"--tf32 {tf32}: {device} has no TF32")
        return [(name, None) for name in names]
    ways = {"on": [True], "off": [False], "both": [False, True], None: [False]}[tf32]
    return [(name, way) for name in names for way in ([False, True] if name == "O0" else ways)]


def _described(
    name: str, args: argparse.Namespace, options: TaskOptions
) -> tuple[dict[str, Any], Any]:
    """Load a task once, so that what is wrong with it is said now, and ask for its defaults."""
    task = tasks.load(name, options)
    optimizer = args.optimizer or task.optimizer
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise UsageError(f"--task {name}: has optimizer {optimizer!r}; use one of {known}")
    if task.epochs < 1 or not (task.lr is None or 0 < task.lr < float("inf")):
        raise UsageError(
            f"--task {name}: has epochs {task.epochs} and lr {task.lr}; epochs of 1 or more and an "
            "lr above 0, or None, are needed"
        )
    own = task.lr if optimizer == task.optimizer else None
    described = {
        "task": name,
        "optimizer": optimizer,
        "lr": args.lr or own or OPTIMIZERS[optimizer]["lr"],
        "epochs": args.epochs or task.epochs,
    }
    return described, task.loader


def _check_batches(name: str, loader: Any, batches: Sequence[int]) -> None:
    """Ask the task for a batch of each size: it knows which are too large."""
    for size in batches:
        try:
            first = next(iter(loader(size, 0)), None)
        except UsageError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise UsageError(f"--task {name}: loader({size}, 0) raised {said}") from error
        if first is None:
            raise UsageError(f"--batch {size}: {name} has not so many samples")


def _batch(text: str) -> int:
    return MAX if text == "max" else at_least(1)(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(text: str) -> int:
    """Read a size such as 512MiB or 1.5GB."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            with suppress(argparse.ArgumentTypeError):
                return int(_positive(text.removesuffix(unit)) * factor)
    raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 1.5GB")
