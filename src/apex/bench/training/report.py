"""Output of `apex bench`: the answer, the table and the sentences in the terminal, and all files.

It takes a finished `Report` and shows it; it never trains.
"""

from collections.abc import Sequence
from pathlib import Path

from apex.bench.output.columns import fitted, write_csv
from apex.bench.output.console import console
from apex.bench.training import page, plots
from apex.bench.training.notes import largest_said, marks, notes, problems, source
from apex.bench.training.recommendation import answers
from apex.bench.training.results import Report
from apex.bench.training.rows import BASELINE
from apex.bench.training.sentences import beside, sentence
from apex.bench.training.table import COLUMNS, lines, write_runs_csv
from apex.bench.training.verdict import Verdict

__all__ = ["show", "write_all"]

WIDTH = 120  # columns, where the output is no terminal


def show(report: Report, verdicts: Sequence[Verdict], folder: Path) -> None:
    """Print answer, tables and sentences on standard output, and write every file into ``folder``.

    Args:
        report: What was measured, perhaps in part.
        verdicts: What `apex.bench.training.verdict.verdicts` says of it.
        folder: Where ``results.json`` is already; it has to be there.
    """
    to = console(WIDTH)
    if not (report.runs or report.largest):
        to.print("Interrupted before the first run was finished: there is nothing to show.")
        return
    if report.plan:
        for answer in answers(report, verdicts):
            to.print(answer, style="bold", markup=False)
    to.print(", ".join([source(report.environment), *_settings(report)]), markup=False)
    for mark in marks(report):
        to.print(mark, style="bold", markup=False)
    made = lines(report, verdicts)
    for task, batch in dict.fromkeys((line.row.task, line.row.batch) for line in made):
        here = [line for line in made if (line.row.task, line.row.batch) == (task, batch)]
        table, _ = fitted(COLUMNS, here, to)
        to.print(f"\n{task}, batch size {batch}", style="bold", markup=False)
        to.print(table)
        for said in _sentences([v for v in verdicts if _place(v) == (task, batch)]):
            to.print(f"- {said}", markup=False)
    to.print()
    for line in _remarks(report, verdicts):
        to.print(line, markup=False)
    write_all(report, verdicts, folder)
    said = "All of it, with plots and how it was measured:"
    to.print(f"{said} {folder / 'report.html'}", markup=False, soft_wrap=True)


def write_all(report: Report, verdicts: Sequence[Verdict], folder: Path) -> None:
    """Write everything that is made from a report: the page, CSV files, plots."""
    write_csv(COLUMNS, lines(report, verdicts), folder / "results.csv")
    write_runs_csv(report, folder / "runs.csv")
    page.write(report, verdicts, plots.draw(report, verdicts, folder), folder / "report.html")


def _place(verdict: Verdict) -> tuple[str, int]:
    return verdict.row.task, verdict.row.batch


def _sentences(here: Sequence[Verdict]) -> list[str]:
    """Say of each level what it is beside O0; of torch's autocast beside ours, the speeds alone."""
    said = [sentence(verdict) for verdict in here if verdict.other.level == BASELINE]
    natives = [verdict for verdict in here if verdict.other.level != BASELINE]
    if natives:
        each = [f"{v.row.label} {beside(v)} {v.other.label}'s" for v in natives]
        said.append(f"Speed beside torch's own autocast: {', '.join(each)}.")
    return said


def _remarks(report: Report, verdicts: Sequence[Verdict]) -> list[str]:
    return [
        *(f"{largest_said(found)}." for found in report.largest),
        *(f"{where}: {problem}" for where, problem in problems(report)),
        *notes(report, verdicts),
    ]


def _settings(report: Report) -> list[str]:
    optimizers = sorted({cell.optimizer for cell in report.plan})
    seeds = len({cell.seed for cell in report.plan})
    return [*optimizers, f"{seeds} seed{'s' * (seeds > 1)}"] if report.plan else []
