"""What tables are printed on, and how a number stands in them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["NOTHING", "aligned", "console", "number"]

NOTHING = "—"


def console(width: int) -> Console:
    """Standard output, as wide as its terminal; ``width`` columns where it is a file or a pipe.

    Rich takes those to be 80 wide, which would break long rows.
    """
    from rich.console import Console

    terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if terminal else width, highlight=False)


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Indent rows of text, and line up all columns but the last, where rich may be missing."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)]
        yield ("  " + "  ".join(cells)).rstrip()


def number(value: float | None, spec: str, unit: str = "") -> str:
    """Format a number that may not be there."""
    return NOTHING if value is None else f"{value:{spec}}{unit}"
