"""The columns of `apex bench kernels`, and what stands above each table.

The JSON file and the CSV file have their numbers: see `record`.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from apex.bench.kernels.timing import Row
from apex.bench.output.columns import Column, Value, span, three
from apex.bench.output.console import NOTHING, number

__all__ = ["COLUMNS", "record", "sets", "title"]


def record(row: Row) -> dict[str, Value]:
    """The numbers of a row by their names."""
    return {name: of(row) for column in COLUMNS for name, of in column.numbers.items()}


def sets(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Put the rows of a set of shapes and dtype together: each is a table and a plot."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.shapes, row.dtype), []).append(row)
    return found


def title(rows: Sequence[Row]) -> str:
    """Name a set of shapes and dtype."""
    first = rows[0]
    count = f"{first.tensors:,} tensor{'s' * (first.tensors > 1)}"
    return f"{first.shapes}: {count}, {first.elements:,} elements, {first.dtype}"


def _column(
    heading: str, name: str, text: Callable[[Any], str], meaning: str, absent: str, drop: int = 0
) -> Column[Row]:
    """A number of a row."""
    of = attrgetter(name)
    return Column(heading, lambda row: text(of(row)), {name: of}, meaning, absent, drop)


def _word(name: str, *, group: bool = False) -> Column[Row]:
    of = attrgetter(name)
    return Column(name, lambda row: str(of(row)), {name: of}, left=True, group=group)


def _end(name: str) -> Callable[[Row], Value]:
    """An end of the interval."""
    return lambda row: getattr(row.bounds, name, None)


OURS = "it is our own row, or one of the two failed"
NO_BYTES = "no bytes are declared for it, or the provider failed"
FAILED = "the provider failed"

COLUMNS: tuple[Column[Row], ...] = (
    *(
        _word(name, group=True)
        for name in ("shapes", "dtype", "tensors", "elements", "repeats", "threads", "huge_pages")
    ),
    _word("op"),
    _word("provider"),
    _column("ms", "p50_ms", three, "median over the turns", FAILED),
    Column(
        "p20–p80", lambda row: span(row.p20_ms, row.p80_ms),
        {"p20_ms": attrgetter("p20_ms"), "p80_ms": attrgetter("p80_ms")},
        "twentieth and eightieth percentile of the same turns, in ms", FAILED, drop=4,
    ),
    _column(
        "our time\n/ its", "ratio", lambda value: number(value, ".2f", "×"),
        "our time divided by this provider's in the same turn, the geometric mean over the turns: "
        "below 1 ours is faster", OURS,
    ),
    Column(
        "95 %\ninterval",
        lambda row: f"{row.bounds.low:.2f}–{row.bounds.high:.2f}" if row.bounds else NOTHING,
        {"ratio_low": _end("low"), "ratio_high": _end("high")},
        "confidence interval of that ratio over the turns, by Student's t",
        f"fewer than three turns; {OURS}", drop=2,
    ),
    _column(
        "B per\nelement", "bytes_per_element", lambda value: number(value, "g"),
        "bytes that have to be moved, as declared for each provider", NO_BYTES, 6,
    ),
    _column("GB/s", "gb_s", three, "those bytes by the median time", NO_BYTES, 5),
    _column(
        "of copy", "of_copy", lambda value: number(value, ".0%"),
        "the same divided by that of a copy in the same run", NO_BYTES, 5,
    ),
    _column(
        "peak\nMiB", "peak_mib", three, "tensor memory of one call beyond its inputs",
        "measured only for forward and backward together", 3,
    ),
    _column(
        "host\nms", "host_ms", three,
        "until the call returns on a GPU; on a CPU, of tensors of one element each", FAILED, 7,
    ),
    _column(
        "launches", "launches", lambda value: number(value, "d"),
        "kernels of one call, counted by torch's profiler", FAILED, 6,
    ),
    Column(
        "problem", lambda row: (row.problem or "").partition(":")[0],
        {"problem": attrgetter("problem")}, left=True,
    ),
)  # fmt: skip
