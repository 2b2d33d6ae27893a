"""The page of `apex bench`, one file: answer, verdicts, pictures, tables, how it was measured."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apex.commands.bench.output import html
from apex.commands.bench.output.figures import Drawn, style
from apex.commands.bench.output.html import Cell
from apex.commands.bench.training.answer import answers
from apex.commands.bench.training.notes import marks, notes, problems, source
from apex.commands.bench.training.results import FORMAT, Results
from apex.commands.bench.training.results import Cell as PlannedCell
from apex.commands.bench.training.rows import BASELINE, LevelRow
from apex.commands.bench.training.sentences import sentences
from apex.commands.bench.training.table import COLUMNS, Line, lines
from apex.commands.bench.training.verdict import Verdict, baseline_of
from apex.commands.options import unique
from apex.commands.tables import NOTHING, filled, number

__all__ = ["write"]

MAIN = 9  # columns of the first table: as many as fit beside each other
LONGEST = 3  # operators of each level
CAPTIONS = {
    "overview": "Small dots are seeds, each against O0 with the same seed; markers with whiskers "
    "are the mean and its 95 % interval, which fewer than three seeds do not have. “as O1”: all "
    "losses are the same numbers as O1's, so the arithmetic is the same.",
    "time": "Dots are the median steps of the seeds, the line is their mean.",
    "memory": "Tensors only, without the scratch space of libraries.",
    "accuracy": "Dots are seeds, the line is their mean.",
    "loss": "Each point is a step, or the mean of several in a long run. Levels of the same "
    "losses are one line.",
    "scale": "Only levels whose scale moved. It halves at a step whose gradients overflowed, which "
    "is skipped, and grows after a run of good steps.",
}


def write(
    report: Results, verdicts: Sequence[Verdict], drawn: dict[str, Drawn], path: Path
) -> None:
    """Write the page.

    Args:
        report: What was measured.
        verdicts: What is compared.
        drawn: The plots, as `apex.commands.bench.training.plots.draw` returns them.
        path: The file.
    """
    made = lines(report, verdicts)
    if len({cell.batch for cell in report.plan}) < 2:  # the overview has these numbers
        drawn = {
            name: plot for name, plot in drawn.items() if name in ("overview", "loss", "scale")
        }
    groups: dict[str, list[Verdict]] = {}  # against O0, of a task and batch size
    for verdict in verdicts:
        if verdict.other.level == BASELINE:
            where = f"{verdict.row.task}, batch size {verdict.row.batch}"
            groups.setdefault(where, []).append(verdict)
    html.render(
        "report.html.j2",
        path,
        environment=report.environment,
        content={"format": FORMAT, **dataclasses.asdict(report)},
        colour=lambda label: style(label).colour,
        report=report,
        title=", ".join(unique(cell.task for cell in report.plan)),
        source=source(report.environment),
        marks=marks(report),
        answers=answers(report, verdicts),
        statuses=Counter(run.status for run in report.runs),
        groups=groups,
        sentences=sentences,
        remarks=notes(report, verdicts),
        plots={name: html.plot(plot, CAPTIONS[name]) for name, plot in drawn.items()},
        questions=_questions(report, verdicts, made),
        tables=_tables(made),
        problems=problems(report),
        notes=report.notes,
        settings=_settings(report),
        **html.about_columns(COLUMNS, made),
    )


def _tables(made: Sequence[Line]) -> list[dict[str, Any]]:
    """Make the table of all levels, in two parts where it has many columns."""
    columns = filled(COLUMNS, made)
    names = [column for column in columns if column.group or column.heading == "level"]
    others = sorted((c for c in columns if c not in names), key=lambda column: column.drop)
    return [
        html.column_table(
            [c for c in columns if c in names or c in part], made, lambda line: line.row.label
        )
        for part in (others[: MAIN - 2], others[MAIN - 2 :])
        if part
    ]


def _questions(
    report: Results, verdicts: Sequence[Verdict], made: Sequence[Line]
) -> dict[str, tuple[str, Any]]:
    """Make small tables for what is asked next, with a sentence on each."""
    table = [line.row for line in made]
    found = {
        "apex beside torch's autocast": (
            "Each level against torch.autocast in the same dtype.",
            [(v.row.label, _beside(v)) for v in verdicts if v.other.level != BASELINE],
        ),
        "Where the time of a step goes": (
            f"The {LONGEST} operators that take longest at each level: share of the step, and the "
            "time of all its dtypes relative to O0's (one step under torch's profiler).",
            [(row.label, _operators(row, table)) for row in table if row.operators],
        ),
    }  # fmt: skip
    return {name: (about, html.table(of)) for name, (about, of) in found.items() if of}


def _where(row: LevelRow) -> dict[str, Cell]:
    return {
        "task": (row.task, None),
        "batch": (str(row.batch), row.batch),
        "level": (row.label, None),
    }


def _beside(verdict: Verdict) -> dict[str, Cell]:
    known, judged = verdict.speed, verdict.accuracy
    ends = f"× ({known.low:.2f} to {known.high:.2f})" if known else "×"
    speed = "too noisy" if verdict.noise else number(verdict.ratio, ".2f", ends)
    points: Cell = (NOTHING, None)
    if verdict.same:
        points = ("same arithmetic", None)
    elif judged:
        found = judged.interval
        points = (f"{found.low:+.2f} to {found.high:+.2f}", found.value)
    return {
        **_where(verdict.row),
        "against": (verdict.other.label, None),
        "speed": (speed, None if verdict.noise else verdict.ratio),
        "memory": (number(verdict.memory, ".2f", "×"), verdict.memory),
        "points of accuracy": points,
    }


def _operators(row: LevelRow, table: Sequence[LevelRow]) -> dict[str, Cell]:
    base, total = baseline_of(row, table), sum(one.ms for one in row.operators)
    theirs, each = base.operators if base and base is not row else (), []
    for one in sorted(row.operators, key=lambda one: -one.ms)[:LONGEST]:
        before = sum(other.ms for other in theirs if other.name == one.name)
        mine = sum(other.ms for other in row.operators if other.name == one.name)
        grown = f" ({mine / before:.2f}×)" if before else ""
        each.append(f"{one.name} {one.dtype} {one.ms / total:.0%}{grown}")
    return {**_where(row), "operators": ("; ".join(each), None)}


def _settings(report: Results) -> list[tuple[str, str]]:
    """List the values that the cells of the plan have, and what holds for all."""
    names = [field.name for field in dataclasses.fields(PlannedCell)]
    found = [(n, html.join(unique(getattr(c, n) for c in report.plan))) for n in names]
    found += [("margin", f"{report.margin:g} points of accuracy, and at least three test samples")]
    if report.budget_s is not None:
        found += [("budget", f"{report.budget_s:g} s")]
    return [*found, ("took", f"{report.seconds:.0f} s")]
