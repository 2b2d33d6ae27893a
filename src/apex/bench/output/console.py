"""What tables are printed on, and how a number stands in them."""

from __future__ import annotations

import os
import sys
import textwrap
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


def aligned(rows: Iterable[Sequence[str]], width: int | None = None) -> Iterator[str]:
    """Indent rows of text, and line up all columns but the last, where rich may be missing.

    With a width the last column goes on below itself; words, which may be paths, stay whole.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    left = sum(widths) + 2 * len(widths) + 2
    for row in rows:
        cells = [cell.ljust(wide) for cell, wide in zip(row[:-1], widths, strict=True)]
        first, *more = _wrapped(row[-1], width - left) if width else [row[-1]]
        yield ("  " + "  ".join([*cells, first])).rstrip()
        yield from (" " * left + line for line in more)


def _wrapped(text: str, width: int) -> list[str]:
    width = max(width, 30)
    if len(text) <= width:
        return [text]  # as it is: two spaces stay two
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def number(value: float | None, spec: str, unit: str = "") -> str:
    """Format a number that may not be there."""
    return NOTHING if value is None else f"{value:{spec}}{unit}"
