"""Output of `apex bench`: the table and the sentences in the terminal, and every file beside.

It takes a finished `Report` and shows it; it never trains. Rich, matplotlib and Jinja2 come with
the ``bench`` extra and are imported where they are used.
"""

from collections.abc import Sequence
from pathlib import Path

from apex.bench.output.columns import fitted, write_csv
from apex.bench.output.console import console
from apex.bench.training import page, plots
from apex.bench.training.remarks import largest_said, marks, notices, problems, source
from apex.bench.training.results import Report
from apex.bench.training.table import COLUMNS, lines, write_runs_csv
from apex.bench.training.verdict import Verdict

__all__ = ["show", "write_all"]

WIDTH = 120  # columns, where the output is no terminal


def show(report: Report, verdicts: Sequence[Verdict], folder: Path) -> None:
    """Print tables and verdicts on standard output, and write every file into ``folder``.

    Args:
        report: What was measured, perhaps in part.
        verdicts: What `apex.bench.training.verdict.verdicts` says of it.
        folder: Where ``results.json`` is already; it has to be there.
    """
    to = console(WIDTH)
    if not (report.runs or report.largest):
        to.print("Interrupted before the first run was finished: there is nothing to show.")
        return
    for line in _title(report):
        to.print(line, style="bold", markup=False)
    made = lines(report, verdicts)
    left_out_of_all: dict[str, None] = {}
    for task, batch in dict.fromkeys((line.row.task, line.row.batch) for line in made):
        here = [line for line in made if (line.row.task, line.row.batch) == (task, batch)]
        table, left_out = fitted(COLUMNS, here, to)
        to.print(f"\n{task}, batch size {batch}", style="bold", markup=False)
        to.print(table)
        left_out_of_all |= dict.fromkeys(left_out)
        for verdict in verdicts:
            if (verdict.task, verdict.batch) == (task, batch):
                to.print(f"- {verdict.sentence}", markup=False)
    to.print()
    for line in _remarks(report):
        to.print(line, markup=False)
    if left_out_of_all:
        said = f"Columns left out, too wide: {', '.join(left_out_of_all)} (results.csv has all)."
        to.print(said, style="dim", markup=False)
    write_all(report, verdicts, folder)
    said = "All of it, with plots and how it was measured:"
    to.print(f"{said} {folder / 'report.html'}", markup=False, soft_wrap=True)


def write_all(report: Report, verdicts: Sequence[Verdict], folder: Path) -> None:
    """Write everything that is made from a report: the page, CSV files, plots."""
    write_csv(COLUMNS, lines(report, verdicts), folder / "results.csv")
    write_runs_csv(report, folder / "runs.csv")
    svgs = plots.draw(report, verdicts, folder)
    page.write(report, verdicts, svgs, folder / "report.html")


def _remarks(report: Report) -> list[str]:
    return [
        *(f"{largest_said(found)}." for found in report.largest),
        *(f"{where}: {problem}" for where, problem in problems(report)),
        *notices(report),
    ]


def _title(report: Report) -> list[str]:
    def several(name: str, values: set[object]) -> str:
        ordered = sorted(values, key=str)
        return f"{name}s {', '.join(map(str, ordered))}" if ordered[1:] else f"{name} {ordered[0]}"

    said = [source(report.environment)]
    if report.plan:
        seeds = len({cell.seed for cell in report.plan})
        said += [
            several("optimizer", {cell.optimizer for cell in report.plan}),
            f"{seeds} seed" if seeds == 1 else f"{seeds} seeds (mean ± standard deviation)",
        ]
    return [", ".join(said), *marks(report)]
