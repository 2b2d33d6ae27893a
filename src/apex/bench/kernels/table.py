"""The columns of `apex bench kernels`, and what stands above each table."""

from collections.abc import Callable, Sequence
from typing import Any

from apex.bench.kernels.model import Model
from apex.bench.kernels.rows import Row
from apex.bench.output.columns import Column, Value, span, three
from apex.bench.output.console import NOTHING, number

__all__ = ["COLUMNS", "sets", "title"]


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


def _of(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row, name)


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: str(getattr(row, name))


def _interval(row: Row) -> str:
    if row.ratio_low is None or row.ratio_high is None:
        return NOTHING
    return f"{row.ratio_low:.2f}–{row.ratio_high:.2f}"


def _model_number(name: str) -> Callable[[Row], Value]:
    return lambda row: getattr(row.model, name, None)


def _model(model: Model | None) -> str:
    if model is None:
        return NOTHING
    moved = "" if model.bytes is None else f"{three(model.bytes / 1e6)} MB, "
    fit = " ".join(map(str, model.programs.values())) or NOTHING
    launches = f"{model.launches} launch{'es' * (model.launches != 1)}"
    return "none" if model.problem else f"{moved}{launches}, {fit} / SM"


OURS = "it is our own row, or one of the two failed"
NO_BYTES = "no bytes are declared for it, or the provider failed"

COLUMNS: tuple[Column[Row], ...] = (
    *(Column(name, _text(name), {name: _of(name)}, group=True)
      for name in ("shapes", "dtype", "tensors", "elements", "repeats", "threads", "huge_pages")),
    Column("op", _of("op"), {"op": _of("op")}, left=True),
    Column("provider", _of("provider"), {"provider": _of("provider")}, left=True),
    Column("ms", lambda row: three(row.p50_ms), {"p50_ms": _of("p50_ms")},
           "median over the turns", "the provider failed"),
    Column(
        "p20–p80", lambda row: span(row.p20_ms, row.p80_ms),
        {"p20_ms": _of("p20_ms"), "p80_ms": _of("p80_ms")},
        "twentieth and eightieth percentile of the same turns, in ms", drop=4,
    ),
    Column(
        "our time\n/ its", lambda row: number(row.ratio, ".2f", "×"), {"ratio": _of("ratio")},
        "our time divided by this provider's in the same turn, the geometric mean over the turns: "
        "below 1 ours is faster", OURS,
    ),
    Column(
        "95 %\ninterval", _interval,
        {"ratio_low": _of("ratio_low"), "ratio_high": _of("ratio_high")},
        "confidence interval of that ratio over the turns", f"fewer than three turns; {OURS}",
        drop=2,
    ),
    Column(
        "B per\nelement", lambda row: number(row.bytes_per_element, "g"),
        {"bytes_per_element": _of("bytes_per_element")},
        "bytes that have to be moved, as declared for each provider", NO_BYTES, drop=6,
    ),
    Column("GB/s", lambda row: three(row.gb_s), {"gb_s": _of("gb_s")},
           "those bytes by the median time", NO_BYTES, drop=5),
    Column("of copy", lambda row: number(row.of_copy, ".0%"), {"of_copy": _of("of_copy")},
           "the same divided by that of a copy in the same run", NO_BYTES, drop=5),
    Column("peak\nMiB", lambda row: three(row.peak_mib), {"peak_mib": _of("peak_mib")},
           "tensor memory of one call beyond its inputs",
           "measured only for forward and backward together", drop=3),
    Column("host\nms", lambda row: three(row.host_ms), {"host_ms": _of("host_ms")},
           "until the call returns on a GPU; on a CPU, of tensors of one element each",
           "the provider failed", drop=7),
    Column("launches", lambda row: number(row.launches, "d"), {"launches": _of("launches")},
           "kernels of one call, counted by torch's profiler", "the provider failed", drop=6),
    Column(
        "model", lambda row: _model(row.model),
        {"model_bytes": _model_number("bytes"), "model_launches": _model_number("launches")},
        "of a GPU that is not here; never a time", "only our own rows have it", left=True, drop=3,
    ),
    Column("problem", lambda row: (row.problem or "").partition(":")[0],
           {"problem": _of("problem")}, left=True),
)  # fmt: skip
