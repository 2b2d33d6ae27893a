"""`apex bench plot`: draws results files again, or several machines in one picture."""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from apex.bench.cli import UsageError
from apex.bench.options import check_folder
from apex.bench.training import plots
from apex.bench.training.precision import ALIASES, LEVELS
from apex.bench.training.remarks import source
from apex.bench.training.report import write_all
from apex.bench.training.results import Cell, Report, read
from apex.bench.training.verdict import Verdict, verdicts

__all__ = ["HELP", "add_arguments", "run"]

HELP = (
    "Draw what `apex bench` has measured again: plots, tables and page of each results file, or "
    "with --compare one set of plots with a line for each machine and level."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS", help="results.json of `apex bench`"
    )
    parser.add_argument(
        "--compare", action="store_true", help="overlay the files, one for each machine"
    )
    parser.add_argument(
        "--names", nargs="+", metavar="NAME", help="of the machines (default: of their devices)"
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
        help="where to write; several files without --compare get a folder each in it",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Read every file, then draw."""
    if args.names and len(args.names) != len(args.results):
        raise UsageError(
            f"--names: {len(args.names)} for {len(args.results)} results files; give one for each"
        )
    found = [_load(path, args.levels, args.batch) for path in args.results]
    names = _distinct(args.names or [_machine(report) for report, _ in found])
    check_folder("--out", args.out)
    if args.compare:
        sources = [plots.Source.of(name, *each) for name, each in zip(names, found, strict=True)]
        drawn = plots.compare(sources, args.out)
        print(f"In {args.out}: {', '.join(f'{name}.png, {name}.svg' for name in drawn)}")
        return 0
    for place, (name, each) in enumerate(zip(names, found, strict=True), 1):
        own = f"{place}-{re.sub(r'[^A-Za-z0-9.-]+', '-', name)}"
        folder = args.out if len(found) == 1 else args.out / own
        check_folder("--out", folder)
        write_all(*each, folder)
        print(f"The page, CSV files and plots: {folder / 'report.html'}")
    return 0


def _load(
    path: Path, levels: Sequence[str] | None, batches: Sequence[int] | None
) -> tuple[Report, list[Verdict]]:
    """Read a file, leave out what was not asked for, and try what drawing needs.

    Raises:
        UsageError: It cannot be read, is no sound report, or has nothing that was asked for.
    """
    try:
        report = read(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    names = None if levels is None else {ALIASES.get(level, level) for level in levels}

    def wanted(cell: Cell) -> bool:
        here = names is None or cell.level in names
        return here and (batches is None or cell.batch in batches)

    report = dataclasses.replace(
        report,
        plan=tuple(cell for cell in report.plan if wanted(cell)),
        runs=tuple(run for run in report.runs if wanted(run.cell)),
    )
    if not report.runs:
        raise UsageError(f"{path}: there is no run of these --levels and --batch in it")
    try:
        source(report.environment)
        hash(report.plan)  # a list in place of a number or a name has no hash
        return report, verdicts(report)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is a damaged report of apex bench ({why})") from None


def _distinct(names: Sequence[str]) -> list[str]:
    """Number the names that come more than once."""
    return [
        f"{name} ({names[: place + 1].count(name)})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def _machine(report: Report) -> str:
    return str(report.environment["device"]["name"])
