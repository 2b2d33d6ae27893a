"""Output of `apex bench`: the answer, the table and the sentences in the terminal, and all files.

It takes a finished `Report` and shows it; it never trains.
"""

from collections.abc import Sequence
from pathlib import Path

from apex.bench.options import unique
from apex.bench.output.tables import console, fitted, write_csv
from apex.bench.training import page, plots
from apex.bench.training.notes import marks, notes, problems, source
from apex.bench.training.results import Report
from apex.bench.training.rows import BASELINE
from apex.bench.training.sentences import answers, beside, sentences
from apex.bench.training.table import COLUMNS, lines
from apex.bench.training.verdict import Verdict

__all__ = ["show", "write_all"]


def show(report: Report, verdicts: Sequence[Verdict], folder: Path) -> None:
    """Print answer, tables and sentences on standard output, and write every file into ``folder``.

    Args:
        report: What was measured, perhaps in part.
        verdicts: What `apex.bench.training.verdict.verdicts` says of it.
        folder: Where ``results.json`` is already; it has to be there.
    """
    to = console()
    if not report.runs:
        to.print("Interrupted before the first run was finished: there is nothing to show.")
        return
    for answer in answers(report, verdicts):
        to.print(answer, style="bold", markup=False)
    optimizers = unique(cell.optimizer for cell in report.plan)
    seeds = len({cell.seed for cell in report.plan})
    settings = [source(report.environment), *optimizers, f"{seeds} seed{'s' * (seeds > 1)}"]
    to.print(", ".join(settings), markup=False)
    for mark in marks(report):
        to.print(mark, style="bold", markup=False)
    made = lines(report, verdicts)
    for task, batch in dict.fromkeys((line.row.task, line.row.batch) for line in made):
        here = [line for line in made if (line.row.task, line.row.batch) == (task, batch)]
        table, _ = fitted(COLUMNS, here, to)
        to.print(f"\n{task}, batch size {batch}", style="bold", markup=False)
        to.print(table)
        compared = [v for v in verdicts if (v.row.task, v.row.batch) == (task, batch)]
        for sentence in _sentences(compared):
            to.print(f"- {sentence}", markup=False)
    to.print()
    went_wrong = [f"{where}: {problem}" for where, problem in problems(report)]
    for line in [*went_wrong, *notes(report, verdicts)]:
        to.print(line, markup=False)
    write_all(report, verdicts, folder)
    to.print("All of it, with plots and how it was measured:")
    to.print(str(folder / "report.html"), markup=False, soft_wrap=True)  # one word, to be copied


def write_all(report: Report, verdicts: Sequence[Verdict], folder: Path) -> None:
    """Write everything that is made from a report: the page, the CSV file, plots."""
    write_csv(COLUMNS, lines(report, verdicts), folder / "results.csv")
    page.write(report, verdicts, plots.draw(report, verdicts, folder), folder / "report.html")


def _sentences(here: Sequence[Verdict]) -> list[str]:
    """Say of each level what it is beside O0; of torch's autocast beside ours, the speeds alone."""
    found = [" ".join(sentences(v)) for v in here if v.other.level == BASELINE]
    natives = [verdict for verdict in here if verdict.other.level != BASELINE]
    if natives:
        each = [f"{v.row.label} {beside(v)} {v.other.label}'s" for v in natives]
        found.append(f"Speed beside torch's own autocast: {', '.join(each)}.")
    return found
