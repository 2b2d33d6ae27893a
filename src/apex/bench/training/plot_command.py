"""`apex bench plot`: draws results files again."""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from apex.bench.cli import UsageError
from apex.bench.options import check_folder
from apex.bench.training.precision import ALIASES, LEVELS
from apex.bench.training.report import write_all
from apex.bench.training.results import Cell, Report, read
from apex.bench.training.verdict import verdicts

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Draw what `apex bench` has measured again: page, CSV file and plots of each results file."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS", help="results.json of `apex bench`"
    )
    parser.add_argument(
        "--levels", nargs="+", choices=[*LEVELS, *ALIASES], metavar="LEVEL",
        help="which levels to draw (default: all); FP32 is O0 and amp is O1",
    )  # fmt: skip
    parser.add_argument(
        "--batch", nargs="+", type=int, metavar="N", help="which batch sizes to draw (default: all)"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER",
        help="where to write; several files get a folder each in it, named after their own",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Read every file, then draw."""
    found = [_load(path, args.levels, args.batch) for path in args.results]
    names = [re.sub(r"[^A-Za-z0-9.-]+", "-", path.resolve().parent.name) for path in args.results]
    for place, (name, each) in enumerate(zip(names, found, strict=True)):
        own = f"{name}-{names[: place + 1].count(name)}" if names.count(name) > 1 else name
        folder = args.out / own if len(found) > 1 else args.out
        check_folder("--out", folder)
        write_all(each, verdicts(each), folder)
        print(f"The page, CSV file and plots: {folder / 'report.html'}")
    return 0


def _load(path: Path, levels: Sequence[str] | None, batches: Sequence[int] | None) -> Report:
    """Read a file and leave out what was not asked for.

    Raises:
        UsageError: It cannot be read, is no report, or has nothing that was asked for.
    """
    report = read(path)
    names = LEVELS if levels is None else [ALIASES.get(level, level) for level in levels]

    def wanted(cell: Cell) -> bool:
        return cell.level in names and (batches is None or cell.batch in batches)

    plan = tuple(cell for cell in report.plan if wanted(cell))
    runs = tuple(run for run in report.runs if wanted(run.cell))
    if not runs:
        raise UsageError(f"{path}: there is no run of these --levels and --batch in it")
    return dataclasses.replace(report, plan=plan, runs=runs)
