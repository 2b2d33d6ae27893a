"""The pictures of `apex bench kernels`: our time beside each provider, a picture for each set."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from apex.bench.catalogue.sizes import LISTS, MATRICES
from apex.bench.kernels.cases import DTYPES
from apex.bench.kernels.timing import Row
from apex.bench.kernels.timing_columns import sets
from apex.bench.output.figures import (
    MOST_WRITTEN,
    PANEL,
    Bar,
    Drawn,
    draw_bars,
    new_figure,
    save,
)
from apex.bench.output.looks import provider_look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw"]

LEAST = 12  # places for bars: one of two would be as wide as the plot otherwise


def draw(
    rows: Sequence[Row], folder: Path, stem: str, said: Sequence[str], below: str
) -> dict[str, Drawn]:
    """Draw a plot for each set of shapes and dtype, as PNG and SVG.

    Args:
        rows: What was measured.
        folder: For the files.
        stem: What the names of the files begin with.
        said: Above each figure.
        below: Below each figure.

    Returns:
        The SVG of each plot by the rest of its name.
    """
    found = sets(rows)
    every = dict.fromkeys((*found, *((s, d) for s in (*LISTS, *MATRICES) for d in DTYPES)))
    made: dict[str, Callable[[], Figure | None]] = {
        f"{stem}-{shapes}-{dtype}": partial(_figure, found.get((shapes, dtype), []))
        for shapes, dtype in every  # those of an earlier run go away
    }
    svgs = save(made, folder, said, below)
    return {name.removeprefix(f"{stem}-"): svg for name, svg in svgs.items()}


def _figure(rows: Sequence[Row]) -> "Figure | None":
    """Draw panels one below the other, with no more bars in each than can have their numbers."""
    panels: list[list[tuple[str, list[Bar]]]] = []
    for op in dict.fromkeys(row.op for row in rows):
        bars = [bar for row in rows if row.op == op and (bar := _bar(row))]
        full = not panels or sum(len(b) for _, b in panels[-1]) + len(bars) > MOST_WRITTEN
        if bars and full:
            panels.append([])
        if bars:
            panels[-1].append((op.replace("_", "\n"), bars))
    if not panels:
        return None
    most = max(sum(len(bars) + 1 for _, bars in groups) for groups in panels)
    figure, found = new_figure(len(panels), 1, (max(PANEL[0], 1.0 + 0.3 * most), PANEL[1]))
    for axes, groups in zip(found, panels, strict=True):
        draw_bars(axes, groups)
        axes.set_xlim(-1, max(most, LEAST))  # bars as wide in each panel
        axes.set_ylabel("× the provider's time (95 % interval)")
    found[0].set_title(f"Our time, the provider's = 1: {rows[0].shapes}, {rows[0].dtype}")
    return figure


def _bar(row: Row) -> Bar | None:
    if row.ratio is None:
        return None
    ends = (row.bounds.low, row.bounds.high) if row.bounds else None
    return Bar(row.provider, row.ratio, ends, provider_look(row.provider))
