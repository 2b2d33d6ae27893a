"""``apex bench``: what does each precision level cost and give on this machine, on real data?

The command: its options and their checks, the plan of runs, and what happens when one of them
fails or the user interrupts. One run is in `training`, its numbers in `results`, the table in
`report`, the pictures in `plots`.
"""

import argparse
import importlib
from contextlib import suppress
from pathlib import Path

from apex.bench import report, training
from apex.bench.cli import UsageError
from apex.bench.options import (
    at_least,
    check_folder,
    environment,
    pick_device,
    terminated_like_interrupted,
    unique,
)
from apex.bench.results import Report, Run, write
from apex.bench.training import LEVELS, OPTIMIZERS, Digits

__all__ = ["HELP", "add_arguments", "run"]

HELP = (
    "Train a small convolutional network on handwritten digits once per precision level, then "
    "show what each level costs and gives on this machine: a table, a JSON file and plots."
)

# With these and torch's SGD, O0 reached 98.3 to 99.5 % over twelve seeds on a CPU, and
# at each seed every other level came within 0.34 points of it. Five epochs: only within 1.7.
# All six levels take 13 s on two quiet CPU cores.
EPOCHS = 10
BATCH = 64

OK, FAILED, INTERRUPTED = 0, 1, 130  # exit codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``apex bench``."""
    parser.add_argument(
        "--levels", nargs="+", choices=list(LEVELS), default=list(LEVELS), metavar="LEVEL",
        help=f"which of {' '.join(LEVELS)} to run (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--epochs", type=at_least(1), default=EPOCHS, metavar="N",
        help="passes through the training digits (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", nargs="+", type=at_least(2), default=[BATCH], metavar="N",
        help=f"digits per step; several sizes are compared (default: {BATCH})",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=at_least(1), default=1, metavar="N",
        help="repeat all with N seeds and show mean and standard deviation (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--optimizer", choices=list(OPTIMIZERS), default="sgd", metavar="NAME",
        help=f"which of {' '.join(OPTIMIZERS)} trains (default: %(default)s, which is torch's)",
    )  # fmt: skip
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:N (default: cuda if there is one, else cpu)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("apex-bench"), metavar="FOLDER",
        help="where to put results.json and the plots (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Carry out ``apex bench``.

    Returns:
        0, or 1 if a level failed or diverged, or 130 if the run was interrupted; what was
        finished until then is shown and kept.

    Raises:
        UsageError: An option asks for what cannot be done; nothing was trained.
        ModuleNotFoundError: A package of the ``bench`` extra is missing; nothing was trained.
    """
    for package in ("sklearn", "rich", "matplotlib"):  # now and not after minutes of training
        importlib.import_module(package)
    device = pick_device(args.device)
    data = training.load(device)
    _check_batches(args.batch, len(data.train_x))
    check_folder("--out", args.out)
    bench = _Bench(args, data)
    with terminated_like_interrupted():
        with suppress(KeyboardInterrupt):  # the report says by itself that it is incomplete
            bench.train_all()
        finished = bench.report()
        if finished.runs:
            write(finished, bench.file)
        report.show(finished, args.out)
    if not finished.complete:
        return INTERRUPTED
    return OK if all(run.status == "ok" for run in finished.runs) else FAILED


class _Bench:
    """All the runs that the options ask for, and what has come of them so far."""

    def __init__(self, args: argparse.Namespace, data: Digits) -> None:
        self.file: Path = args.out / "results.json"
        self._data = data
        self._epochs: int = args.epochs
        self._optimizer: str = args.optimizer
        # Seeds outermost: an interrupted bench has all levels at the first seeds.
        self._plan = [
            (level, batch, seed)
            for seed in range(args.seeds)
            for batch in unique(args.batch)
            for level in unique(args.levels)
        ]
        self._options = {
            "levels": {level: LEVELS[level] for level in unique(args.levels)},
            "epochs": args.epochs,
            "batch": unique(args.batch),
            "seeds": args.seeds,
            "device": str(data.device),
            "optimizer": training.described(args.optimizer),
        }
        self._environment = environment(data.device)
        self._runs: list[Run] = []

    def report(self) -> Report:
        return Report(
            environment=self._environment,
            options=self._options,
            planned=len(self._plan),
            complete=len(self._runs) == len(self._plan),
            notes=training.how_measured(self._data),
            runs=tuple(self._runs),
        )

    def train_all(self) -> None:
        steps = sum(self._epochs * (len(self._data.train_x) // batch) for _, batch, _ in self._plan)
        with report.progress(len(self._plan), steps) as progress:
            for level, batch, seed in self._plan:
                progress.begin(f"{level}, batch {batch}, seed {seed}")
                run = training.train(
                    level,
                    batch,
                    seed,
                    self._epochs,
                    self._data,
                    progress,
                    optimizer=self._optimizer,
                )
                self._runs.append(run)
                write(self.report(), self.file)
                progress.end(run)


def _check_batches(batches: list[int], most: int) -> None:
    too_large = [batch for batch in batches if batch > most]
    if too_large:
        raise UsageError(f"--batch {too_large[0]}: there are only {most} training digits")
