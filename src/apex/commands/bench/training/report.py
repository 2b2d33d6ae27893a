"""Output of `apex bench`: the answer, the table and the sentences in the terminal, and all files.

As a command it is `apex bench plot`, which makes the files of earlier results again.
"""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from apex.commands.bench.training import page, plots
from apex.commands.bench.training.answer import answers
from apex.commands.bench.training.notes import marks, notes, problems, source
from apex.commands.bench.training.precision import ALIASES, LEVELS
from apex.commands.bench.training.results import Cell, Results, read
from apex.commands.bench.training.rows import BASELINE
from apex.commands.bench.training.sentences import sentences
from apex.commands.bench.training.table import COLUMNS, lines
from apex.commands.bench.training.verdict import verdicts
from apex.commands.command_line import UsageError
from apex.commands.options import check_folder, unique
from apex.commands.tables import console, fitted, write_csv

__all__ = ["HELP", "add_arguments", "run", "show", "write_all"]

HELP = "Draw what `apex bench` has measured again: page, CSV file and plots of each results file."


def show(report: Results, folder: Path) -> None:
    """Print answer, tables and sentences on standard output, and write every file into ``folder``.

    ``results.json`` is there already.
    """
    to = console()
    if not report.runs:
        to.print(
            "The run was interrupted before its first training ended, so there is nothing to show."
        )
        return
    found = verdicts(report)
    for answer in answers(report, found):
        to.print(answer, style="bold", markup=False)
    optimizers = unique(cell.optimizer for cell in report.plan)
    seeds = len({cell.seed for cell in report.plan})
    settings = [source(report.environment), *optimizers, f"{seeds} seed{'s' * (seeds > 1)}"]
    to.print(", ".join(settings), markup=False)
    for mark in marks(report):
        to.print(mark, style="bold", markup=False)
    made = lines(report, found)
    for task, batch in dict.fromkeys((line.row.task, line.row.batch) for line in made):
        here = [line for line in made if (line.row.task, line.row.batch) == (task, batch)]
        table, _ = fitted(COLUMNS, here, to)
        to.print(f"\n{task}, batch size {batch}", style="bold", markup=False)
        to.print(table)
        for v in () if report.quick else found:  # the page has the sentences of a quick run
            if (v.row.task, v.row.batch, v.other.level) == (task, batch, BASELINE):
                to.print(f"- {' '.join(sentences(v))}", markup=False)
    to.print()
    went_wrong = [f"{where}: {problem}" for where, problem in problems(report)]
    for line in [*went_wrong, *notes(report, found)]:
        to.print(line, markup=False)
    write_all(report, folder)
    to.print("All of it, with plots and how it was measured:")
    to.print(str(folder / "report.html"), markup=False, soft_wrap=True)  # one word, to be copied


def write_all(report: Results, folder: Path) -> None:
    """Write everything that is made from a report: the page, the CSV file, plots."""
    found = verdicts(report)
    write_csv(COLUMNS, lines(report, found), folder / "results.csv")
    page.write(report, found, plots.draw(report, found, folder), folder / "report.html")


# --- apex bench plot -----------------------------------------------------------------------------


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
        write_all(each, folder)
        print(f"The page, CSV file and plots: {folder / 'report.html'}")
    return 0


def _load(path: Path, levels: Sequence[str] | None, batches: Sequence[int] | None) -> Results:
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
