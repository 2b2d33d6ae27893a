"""The page of `apex bench`: verdicts, plots, tables, and how it was measured, in one file."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from apex.bench.output import html
from apex.bench.output.console import NOTHING, number
from apex.bench.output.html import Cell
from apex.bench.output.looks import look
from apex.bench.training.remarks import marks, notices, problems, source
from apex.bench.training.results import FORMAT, Report, Run
from apex.bench.training.results import Cell as PlannedCell
from apex.bench.training.rows import BASELINE
from apex.bench.training.table import COLUMNS, lines, run_fields
from apex.bench.training.verdict import Interval, Verdict

__all__ = ["write"]

SMALL = "overview"  # four of the other plots in one, for a README
CAPTIONS = {
    "speed": "Bars start at 1, the speed of O0: up is faster, down is slower. Whiskers are 95 % "
    "confidence intervals over seeds; bars without them rest on fewer than three seeds.",
    "time": "Error bars reach from the tenth to the ninetieth percentile of the steps.",
    "memory": "Tensors only: what libraries take besides is not in it.",
    "accuracy": "Error bars are one standard deviation over the seeds.",
    "loss": "Each point is a step, or the mean of several in a long run; the band reaches over all "
    "seeds.",
    "loss-difference": "Each level's loss minus that of O0 with the same seed and batch.",
    "scale": "Only levels whose scale moved. It halves at a step whose gradients overflowed, which "
    "is skipped, and grows after a run of good steps.",
}


def write(report: Report, verdicts: Sequence[Verdict], svgs: dict[str, str], path: Path) -> None:
    """Write the page.

    Args:
        report: What was measured.
        verdicts: What is compared.
        svgs: The plots, as `apex.bench.training.plots.draw` returns them.
        path: The file.
    """
    made = lines(report, verdicts)
    html.render(
        "report.html.j2",
        path,
        environment=report.environment,
        content={"format": FORMAT, **dataclasses.asdict(report)},
        colour=lambda label: look(label).colour,
        report=report,
        title=", ".join(_tasks(report)),
        source=source(report.environment),
        marks=marks(report),
        notices=notices(report),
        statuses=Counter(run.status for run in report.runs),
        verdicts=verdicts,
        groups=_groups(verdicts),
        plots={name: html.plot(svg, CAPTIONS[name]) for name, svg in svgs.items() if name != SMALL},
        levels=html.column_table(COLUMNS, made, lambda line: line.row.label),
        comparisons=html.table([(v.label, _comparison(v)) for v in verdicts]),
        runs=html.table([(run.cell.label, _run(run)) for run in report.runs]),
        largest=html.table([(str(found["level"]), html.cells(found)) for found in report.largest]),
        problems=problems(report),
        notes=report.notes,
        settings=_settings(report) if report.plan else [],
        ceilings=[(name, f"{value / 1e9:,.1f} G/s") for name, value in report.ceilings.items()],
        **html.about_columns(COLUMNS if report.plan else (), made),
    )


def _tasks(report: Report) -> list[str]:
    """List the tasks, each once."""
    searched = [str(found["task"]) for found in report.largest]
    return list(dict.fromkeys([*(cell.task for cell in report.plan), *searched]))


def _groups(verdicts: Sequence[Verdict]) -> dict[tuple[str, int], list[Verdict]]:
    """Put the verdicts of a task and batch size together, those against O0 first."""
    groups: dict[tuple[str, int], list[Verdict]] = {}
    for verdict in sorted(verdicts, key=lambda v: not v.against.startswith(BASELINE)):
        groups.setdefault((verdict.task, verdict.batch), []).append(verdict)
    return groups


def _comparison(verdict: Verdict) -> dict[str, Cell]:
    """List the numbers behind a sentence, each with what the page sorts by."""
    speed, accuracy = verdict.speed, verdict.accuracy
    inside = {None: NOTHING, True: "inside", False: "outside"}[verdict.inside]
    return {
        "task": (verdict.task, None),
        "batch": (str(verdict.batch), verdict.batch),
        "level": (verdict.label, None),
        "against": (verdict.against, None),
        "pairs of seeds": (str(verdict.pairs), verdict.pairs),
        "speed": _number(speed.value if speed else None, ".3f", "×"),
        "95 % interval": _ends(speed, ".3f"),
        "speed of all epochs": _number(verdict.total, ".2f", "×"),
        "memory": _number(verdict.memory, ".2f", "×"),
        "points of accuracy": _number(accuracy.value if accuracy else None, "+.2f"),
        "their 95 % interval": _ends(accuracy, "+.2f"),
        "band of seeds": (inside, None),
    }


def _number(value: float | None, spec: str, unit: str = "") -> Cell:
    return number(value, spec, unit), value


def _ends(interval: Interval | None, spec: str) -> Cell:
    if interval is None:
        return NOTHING, None
    return f"{interval.low:{spec}} to {interval.high:{spec}}", interval.low


def _run(run: Run) -> dict[str, Cell]:
    left_out = ("level", "tf32", "quick")  # in the label, and on the whole page
    return html.cells({k: v for k, v in run_fields(run).items() if k not in left_out})


def _settings(report: Report) -> list[tuple[str, str]]:
    """List the values that the cells of the plan have."""
    names = [field.name for field in dataclasses.fields(PlannedCell)]
    return [(n, html.join(dict.fromkeys(getattr(c, n) for c in report.plan))) for n in names]
