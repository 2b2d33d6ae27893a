"""The report as one HTML file: no network, no other files, readable on a phone and in the dark.

The template is ``templates/report.html.j2``. Jinja2 escapes whatever it puts in, because names of
tasks and texts of errors are the user's; only the plots' SVG, in which matplotlib has escaped
them, goes in as it is. Jinja2 comes with the ``bench`` extra and is imported where it is used.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from apex.bench.console import NOTHING, number
from apex.bench.looks import INK, look
from apex.bench.plots import PANEL
from apex.bench.remarks import marks, notices, problems, source
from apex.bench.results import FORMAT, Report, Run, jsonable
from apex.bench.results import Cell as PlannedCell
from apex.bench.rows import BASELINE
from apex.bench.table import COLUMNS, Column, Line, filled, lines, run_fields, three
from apex.bench.verdict import Interval, Verdict

__all__ = ["write"]

Cell = tuple[str, Any]  # the text, and what the page sorts by where that is a number

CAPTIONS = {
    "speed": "Bars start at 1, the speed of O0: up is faster, down is slower. Whiskers are 95 % "
    "confidence intervals over seeds; bars without them rest on fewer than three seeds.",
    "time": "Error bars reach from the tenth to the ninetieth percentile of the steps.",
    "memory": "Tensors only: what libraries take besides is not in it.",
    "accuracy": "Error bars are one standard deviation over the seeds.",
    "loss": "Each point is a step, or the mean of several in a long run; the band reaches over all "
    "seeds.",
    "scale": "Only levels whose scale moved. It halves at a step whose gradients overflowed, which "
    "is skipped, and grows after a run of good steps.",
}


def write(report: Report, verdicts: Sequence[Verdict], svgs: dict[str, str], path: Path) -> None:
    """Write the page.

    Args:
        report: What was measured.
        verdicts: What is compared.
        svgs: The plots, as `apex.bench.plots.draw` returns them.
        path: The file.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    made = lines(report, verdicts)
    text = environment.get_template("report.html.j2").render(
        report=report,
        title=", ".join(_tasks(report)),
        source=source(report),
        date=str(report.environment.get("date", "")).replace("T", " ").replace("+00:00", " UTC"),
        marks=marks(report),
        notices=notices(report),
        statuses=Counter(run.status for run in report.runs),
        verdicts=verdicts,
        groups=_groups(verdicts),
        plots={name: _plot(name, svg) for name, svg in svgs.items() if name != "overview"},
        levels=_levels(made),
        comparisons=_table([(v.label, _comparison(v)) for v in verdicts]),
        runs=_table([(run.cell.label, _run(run)) for run in report.runs]),
        largest=_table([(str(found["level"]), _cells(found)) for found in report.largest]),
        problems=problems(report),
        settings=_settings(report),
        facts=list(_flat(report.environment)),
        ceilings=[(name, f"{value / 1e9:,.1f} G/s") for name, value in report.ceilings.items()],
        meanings=[(_flatten(c.heading), c.meaning) for c in COLUMNS if c.meaning],
        absent=[(_flatten(c.heading), c.absent) for c in COLUMNS if _has_gap(c, made)],
        colour=lambda label: look(label).colour.replace(INK, "currentColor"),
        content=jsonable({"format": FORMAT, **dataclasses.asdict(report)}),
        nothing=NOTHING,
    )
    path.write_text(text, encoding="utf-8")


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


def _plot(name: str, svg: str) -> dict[str, Any]:
    """Make a plot part of a page: the text colour is the page's, and ids that nobody uses go."""
    from markupsafe import Markup

    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[\w.]+_\d+">', "<g>", svg)  # figure_1 is in each of them
    svg = svg.replace(INK, "currentColor")
    width = re.search(r'<svg [^>]*?width="([\d.]+)pt"', svg)
    panels = max(1, round(float(width[1]) / 72 / PANEL[0])) if width else 1
    return {"svg": Markup(svg), "panels": panels, "caption": CAPTIONS[name]}


def _levels(made: Sequence[Line]) -> dict[str, Any]:
    """Make the table of the rows."""
    columns = filled(COLUMNS, made)
    return _table(
        [(x.row.label, {_flatten(c.heading): _cell(c, x) for c in columns}) for x in made]
    )


def _cell(column: Column, line: Line) -> Cell:
    return column.text(line), next(iter(column.numbers.values()))(line)


def _table(of: Sequence[tuple[str, dict[str, Cell]]]) -> dict[str, Any]:
    """Make what the template's table takes of records with the same names."""
    heads = list(of[0][1]) if of else []
    if len({cells["task"] for _, cells in of if "task" in cells}) == 1:
        heads.remove("task")  # the title of the page names it
    return {
        "heads": heads,
        "rows": [{"label": label, "cells": [cells[head] for head in heads]} for label, cells in of],
    }


def _has_gap(column: Column, made: Sequence[Line]) -> bool:
    return bool(column.absent) and any(column.text(line) == NOTHING for line in made)


def _flatten(heading: str) -> str:
    return heading.replace("\n", " ")


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
    return _cells({k: v for k, v in run_fields(run).items() if k not in left_out})


def _cells(fields: dict[str, Any]) -> dict[str, Cell]:
    return {
        name.replace("_", " "): (three(value) if isinstance(value, float) else _plain(value), value)
        for name, value in fields.items()
    }


def _settings(report: Report) -> list[tuple[str, str]]:
    """List the values that the cells of the plan have."""
    names = [field.name for field in dataclasses.fields(PlannedCell)]
    return [(n, _join(dict.fromkeys(getattr(c, n) for c in report.plan))) for n in names]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """List the environment: nested names joined, a list in one line."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name} ")
        elif isinstance(value, (list, tuple)):
            items = [item.values() if isinstance(item, dict) else [item] for item in value]
            yield f"{prefix}{name}".replace("_", " "), "; ".join(_join(item) for item in items)
        else:
            yield f"{prefix}{name}".replace("_", " "), _plain(value)


def _join(values: Iterable[Any]) -> str:
    return ", ".join(map(_plain, values))


def _plain(value: Any) -> str:
    """Write a value for people."""
    if value is None or value == "":
        return NOTHING
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
