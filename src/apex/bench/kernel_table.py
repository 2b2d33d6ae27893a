"""The tables that `apex bench kernels` prints."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from apex.bench.console import NOTHING, number
from apex.bench.kernel_model import Model
from apex.bench.kernel_rows import Row

__all__ = ["table"]


class _Column(NamedTuple):
    heading: str
    cell: Callable[[Row], str]
    left: bool = False


COLUMNS = (
    _Column("op", lambda row: row.op, left=True),
    _Column("provider", lambda row: row.provider, left=True),
    _Column("ms", lambda row: _three(row.p50_ms)),
    _Column("p20–p80", lambda row: f"{_three(row.p20_ms)}–{_three(row.p80_ms)}"),
    _Column("apex / it", lambda row: number(None if row.ours else row.ratio, ".2f")),
    _Column("B/element", lambda row: number(row.bytes_per_element, "g")),
    _Column("GB/s", lambda row: _three(row.gb_s)),
    _Column("of copy", lambda row: number(row.of_copy, ".0%")),
    _Column("peak MiB", lambda row: _three(row.peak_mib)),
    _Column("host ms", lambda row: _three(row.host_ms)),
    _Column("launches", lambda row: number(row.launches, "d")),
    _Column("model", lambda row: _model(row.model), left=True),
    _Column("", lambda row: "failed" if row.problem else "", left=True),
)


def table(rows: Sequence[Row]) -> Any:
    """Make the table of one set of shapes and dtype; columns without a number are left out."""
    from rich import box
    from rich.table import Table

    first = rows[0]
    count = f"{first.tensors:,} tensor{'s' * (first.tensors > 1)}"
    title = f"{first.shapes}: {count}, {first.elements:,} elements, {first.dtype}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    empty = {NOTHING, ""}
    columns = [column for column in COLUMNS if {column.cell(row) for row in rows} - empty]
    for column in columns:
        table.add_column(column.heading, justify="left" if column.left else "right", no_wrap=True)
    for row in rows:
        style = "red" if row.problem else "bold" if row.ours else None
        table.add_row(*(column.cell(row) for column in columns), style=style)
    return table


def _model(model: Model | None) -> str:
    if model is None:
        return NOTHING
    moved = "" if model.bytes is None else f"{_three(model.bytes / 1e6)} MB, "
    fit = " ".join(map(str, model.programs.values())) or NOTHING
    launches = f"{model.launches} launch{'es' * (model.launches != 1)}"
    return "none" if model.problem else f"{moved}{launches}, {fit} / SM"


def _three(value: float | None) -> str:
    """Show at least three digits."""
    if value is None:
        return NOTHING
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"
