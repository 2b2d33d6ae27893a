"""Output of `apex bench kernels`: its columns, for the terminal, the JSON file and the CSV file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from apex.bench.kernels.timing import Row
from apex.bench.output.tables import (
    NOTHING,
    Column,
    Value,
    console,
    fitted,
    number,
    span,
    three,
    write_csv,
)

__all__ = ["COLUMNS", "Report", "content", "show"]

FORMAT = "apex bench kernels 4"


@dataclass
class Report:
    """What `apex bench kernels` has measured so far.

    Attributes:
        environment: Of `apex.bench.options.environment`, with ``huge_pages``, whether torch asks
            Linux for them, and ``copy_gb_s``, of a copy on a GPU.
        options: What was asked for.
        notes: How the numbers were taken.
        complete: Whether everything that was asked for was timed.
        missing: Packages that are not installed, with what was not timed for that.
        rows: What was timed.
    """

    environment: dict[str, Any]
    options: dict[str, Any]
    notes: dict[str, str]
    complete: bool = False
    missing: dict[str, list[str]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


def content(report: Report) -> dict[str, Any]:
    """Make what the JSON file has: the fields of the report, and of each row what the CSV has."""
    numbers = {name: of for column in COLUMNS for name, of in column.numbers.items()}
    rows = [{name: of(row) for name, of in numbers.items()} for row in report.rows]
    return {"format": FORMAT, **vars(report), "rows": rows}


def show(report: Report, file: Path) -> None:
    """Print the tables, and write the CSV file beside ``file``."""
    to = console()
    if not report.rows:
        to.print("Interrupted before the first case was finished: nothing to show.")
        return
    to.print(_source(report), style="bold", markup=False)
    for mark in _marks(report):
        to.print(mark, style="bold red")
    for shapes, dtype in dict.fromkeys((row.shapes, row.dtype) for row in report.rows):
        rows = [row for row in report.rows if (row.shapes, row.dtype) == (shapes, dtype)]
        table, left_out = fitted(COLUMNS, rows, to, _style)
        to.print(f"\n{_title(rows)}", style="italic", markup=False)
        to.print(table)
        if left_out:
            said = f"Columns left out, too wide: {', '.join(left_out)} ({file.stem}.csv has all)."
            to.print(said, style="dim", markup=False)
    for where, said in (*_problems(report), *report.notes.items()):
        to.print(f"{where}: {said.rstrip('.')}.", markup=False, style="dim")
    write_csv(COLUMNS, report.rows, file.with_suffix(".csv"))
    to.print(f"In {file.parent}: {file.name}, {file.stem}.csv", markup=False)


def _title(rows: Sequence[Row]) -> str:
    """Name a set of shapes and dtype."""
    first = rows[0]
    count = f"{first.tensors:,} tensor{'s' * (first.tensors > 1)}"
    return f"{first.shapes}: {count}, {first.elements:,} elements, {first.dtype}"


def _source(report: Report) -> str:
    """Say what the numbers depend on."""
    here, turns = report.environment, report.options["repeats"]
    threads, copy, versions = here["threads"], here["copy_gb_s"], here["versions"]
    said = [
        here["device"]["name"],
        f"torch {versions['torch']}, apex {versions['apex']}",
        f"{threads} thread{'s' * (threads > 1)}",
        f"{turns} turn{'s' * (turns > 1)}",
        "THP_MEM_ALLOC_ENABLE=1" if here["huge_pages"] else "",
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


# --- columns --------------------------------------------------------------------------------------


def _column(heading: str, name: str, text: Callable[[Any], str], drop: int = 0) -> Column[Row]:
    """A number of a row."""
    of = attrgetter(name)
    return Column(heading, lambda row: text(of(row)), {name: of}, drop=drop)


def _word(name: str, *, group: bool = False) -> Column[Row]:
    of = attrgetter(name)
    return Column(name, lambda row: str(of(row)), {name: of}, left=True, group=group)


def _end(name: str) -> Callable[[Row], Value]:
    """An end of the interval."""
    return lambda row: getattr(row.bounds, name, None)


COLUMNS: tuple[Column[Row], ...] = (
    *(_word(name, group=True) for name in ("shapes", "dtype", "tensors", "elements")),
    _word("op"),
    _word("provider"),
    _column("ms", "p50_ms", three),
    Column(
        "p20–p80", lambda row: span(row.p20_ms, row.p80_ms),
        {"p20_ms": attrgetter("p20_ms"), "p80_ms": attrgetter("p80_ms")}, drop=4,
    ),
    _column("our time\n/ its", "ratio", lambda value: number(value, ".2f", "×")),
    Column(
        "95 %\ninterval",
        lambda row: f"{row.bounds.low:.2f}–{row.bounds.high:.2f}" if row.bounds else NOTHING,
        {"ratio_low": _end("low"), "ratio_high": _end("high")}, drop=2,
    ),
    _column("B per\nelement", "bytes_per_element", lambda value: number(value, "g"), 6),
    _column("GB/s", "gb_s", three, 5),
    _column("of copy", "of_copy", lambda value: number(value, ".0%"), 5),
    _column("peak\nMiB", "peak_mib", three, 3),  # of a call, beyond its inputs: modes "both"
    _column("host\nms", "host_ms", three, 7),  # until the call returns, on a GPU
    _column("launches", "launches", lambda value: number(value, "d"), 6),
    Column(
        "problem", lambda row: (row.problem or "").partition(":")[0],
        {"problem": attrgetter("problem")}, left=True, wraps=True,
    ),
)  # fmt: skip
