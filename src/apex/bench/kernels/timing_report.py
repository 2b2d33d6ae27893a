"""Output of `apex bench kernels`: tables in the terminal, and the files beside the JSON file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apex.bench.kernels import timing_plots
from apex.bench.kernels.timing import HUGE_PAGES, Row
from apex.bench.kernels.timing_columns import COLUMNS, record, sets, title
from apex.bench.output import html
from apex.bench.output.columns import fitted, write_csv
from apex.bench.output.console import console
from apex.bench.output.looks import provider_look
from apex.bench.training.notes import source

__all__ = ["Report", "content", "show"]

FORMAT = "apex bench kernels 3"
WIDTH = 150  # columns, where the output is no terminal


@dataclass
class Report:
    """What `apex bench kernels` has measured so far."""

    environment: dict[str, Any]
    """Of `apex.bench.options.environment`, with ``copy_gb_s``: of a copy on a GPU."""
    options: dict[str, Any]
    """What was asked for."""
    notes: dict[str, str]
    """How the numbers were taken."""
    complete: bool = False
    """Whether everything that was asked for was timed."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """Packages that are not installed, with what was not timed for that."""
    rows: list[Row] = field(default_factory=list)


def content(report: Report) -> dict[str, Any]:
    """Make what the JSON file has: the fields of the report, and of each row what the CSV has."""
    return {"format": FORMAT, **vars(report), "rows": [record(row) for row in report.rows]}


def show(report: Report, file: Path) -> None:
    """Print the tables, and write page, CSV file and plots beside ``file``."""
    to = console(WIDTH)
    if not report.rows:
        to.print("Interrupted before the first case was finished: nothing to show.")
        return
    to.print(_source(report), style="bold", markup=False)
    for mark in _marks(report):
        to.print(mark, style="bold red")
    for rows in sets(report.rows).values():
        table, left_out = fitted(COLUMNS, rows, to, _style)
        to.print(f"\n{title(rows)}", style="italic", markup=False)
        to.print(table)
        if left_out:
            said = f"Columns left out, too wide: {', '.join(left_out)} ({file.stem}.csv has all)."
            to.print(said, style="dim", markup=False)
    for where, said in (*_problems(report), *report.notes.items()):
        to.print(f"{where}: {said.rstrip('.')}.", markup=False, style="dim")
    names = ", ".join([file.name, *_write_all(report, file)])
    to.print(f"In {file.parent}: {names}", markup=False)


def _write_all(report: Report, file: Path) -> list[str]:
    said, here = _marks(report), _source(report)
    svgs = timing_plots.draw(report.rows, file.parent, file.stem, said, here)
    write_csv(COLUMNS, report.rows, file.with_suffix(".csv"))
    columns = [column for column in COLUMNS if not column.group]
    copy = report.environment["copy_gb_s"]
    found = sets(report.rows)
    captions = {"-".join(key): title(rows) for key, rows in found.items()}
    html.render(
        "kernels.html.j2",
        file.with_suffix(".html"),
        environment=report.environment,
        content=content(report),
        colour=lambda provider: provider_look(provider).colour,
        title=report.environment["device"]["name"],
        file=file.name,
        source=here,
        marks=said,
        turns=report.options["repeats"],
        plots={name: html.plot(svg, captions[name]) for name, svg in svgs.items()},
        tables={
            title(rows): html.column_table(columns, rows, lambda row: row.provider)
            for rows in found.values()
        },
        problems=_problems(report),
        notes=report.notes,
        settings=[
            (name, html.join(value if isinstance(value, list) else [value]))
            for name, value in report.options.items()
        ],
        ceilings=[("copy", f"{copy:.0f} GB/s")] if copy else [],
        **html.about_columns(columns, report.rows),
    )
    drawn = [f"{file.stem}-{name}.{suffix}" for name in svgs for suffix in ("png", "svg")]
    return [f"{file.stem}.html", f"{file.stem}.csv", *drawn]


def _source(report: Report) -> str:
    """Say what the numbers depend on."""
    threads, turns = report.environment["threads"], report.options["repeats"]
    copy = report.environment["copy_gb_s"]
    said = [
        source(report.environment),
        f"{threads} thread{'s' * (threads > 1)}",
        f"{turns} turn{'s' * (turns > 1)}",
        f"{HUGE_PAGES}=1" if any(row.huge_pages for row in report.rows) else "",
        f"copy {copy:.0f} GB/s" if copy else "",
    ]
    return ", ".join(filter(None, said))


def _marks(report: Report) -> list[str]:
    found = [] if report.complete else ["INCOMPLETE: interrupted"]
    timed = [row for row in report.rows if row.times]
    unsteady = [row for row in timed if (row.p80_ms or 0) > 2 * (row.p20_ms or 0)]
    if unsteady:
        found.append(f"BUSY MACHINE: {len(unsteady)} of {len(timed)} times vary a lot")
    return found


def _style(row: Row) -> str | None:
    return "red" if row.problem else "bold" if row.ours else None


def _problems(report: Report) -> list[tuple[str, str]]:
    """List what failed, and what is not installed."""
    failed = [
        (f"{row.op}, {row.shapes}, {row.dtype}, {row.provider}", row.problem)
        for row in report.rows
        if row.problem
    ]
    absent = [
        (name, f"not installed (pip install --no-deps {name}); not timed: {', '.join(what)}")
        for name, what in report.missing.items()
    ]
    return failed + absent
