"""Numbers and tables: for people in the terminal, as CSV, and JSON.

A `Column` serves the terminal, the CSV file and the HTML page. `aligned` needs no rich, for
commands that run with torch alone.
"""

import csv
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["NOTHING", "WIDTH", "Column", "Value", "aligned", "console", "filled", "fitted"]
__all__ += ["jsonable", "number", "save", "span", "three", "write_csv"]

NOTHING = "—"
WIDTH = 80  # columns, where the output is no terminal

T = TypeVar("T")  # what a line of the table shows
Value = str | float | int | None


@dataclass(frozen=True)
class Column(Generic[T]):
    """One column of a table. If nothing was measured in it, people do not see it.

    Attributes:
        heading: With line breaks for the terminal.
        text: For people.
        numbers: Heading in the CSV, with the unit, to the number; a page sorts by the first.
        meaning: For a page.
        absent: Why the number may be missing.
        drop: A narrow terminal leaves columns out, the highest first; 0 stays.
        left: Whether the text is aligned on the left.
        wraps: Whether it may take several lines.
        group: Whether it is named in the title of a terminal's table.
    """

    heading: str
    text: Callable[[T], str]
    numbers: dict[str, Callable[[T], Value]]
    meaning: str = ""
    absent: str = ""
    drop: int = 0
    left: bool = False
    wraps: bool = False
    group: bool = False


def filled(columns: Sequence[Column[T]], of: Sequence[T]) -> list[Column[T]]:
    """Leave out the columns without any value."""
    return [column for column in columns if any(column.text(x) not in ("", NOTHING) for x in of)]


# --- numbers -------------------------------------------------------------------------------------


def number(value: float | None, spec: str, unit: str = "") -> str:
    """Format a number that may not be there."""
    return NOTHING if value is None else f"{value:{spec}}{unit}"


def three(value: float | None) -> str:
    """Show at least three digits, and no more decimals than they need."""
    if value is None:
        return NOTHING
    if abs(value) < 1:
        return f"{value:.3g}"
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def span(low: float | None, high: float | None) -> str:
    """Show the two ends of a range."""
    return NOTHING if low is None or high is None else f"{three(low)}–{three(high)}"


# --- CSV -----------------------------------------------------------------------------------------


def write_csv(columns: Sequence[Column[T]], of: Sequence[T], path: Path) -> None:
    """Write a line for each of ``of``: plain numbers, nothing where nothing was measured."""
    heads = {name: value for column in columns for name, value in column.numbers.items()}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(heads)
        writer.writerows([value(line) for value in heads.values()] for line in of)


# --- JSON ----------------------------------------------------------------------------------------


def save(content: dict[str, Any], path: Path) -> None:
    """Write JSON whole or not at all; `write` says what becomes of inf and nan."""
    text = json.dumps(jsonable(content), indent=1, allow_nan=False)
    # A list of numbers goes on one line. Strings are safe: there is no bare line break in them.
    text = re.sub(r"\[\n[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:  # an interruption too leaves no litter
        temporary.unlink(missing_ok=True)


def jsonable(value: Any) -> Any:
    """Replace inf and nan by strings and tuples by lists."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# --- the terminal --------------------------------------------------------------------------------


def console(*, stderr: bool = False) -> "Console":
    """Standard output or error, as wide as its terminal, or `WIDTH` in a file or a pipe."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:  # rich's ends the process with the exit code 1
            raise BrokenPipeError

    terminal = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    return _Console(width=None if terminal else WIDTH, highlight=False, stderr=stderr)


def fitted(
    columns: Sequence[Column[T]],
    of: Sequence[T],
    to: "Console",
    style: Callable[[T], str | None] = lambda line: None,
) -> "tuple[Table, list[str]]":
    """Make a table that fits the console, and name the columns that had to be left out."""
    columns = filled([column for column in columns if not column.group], of)
    unlimited = to.options.update(max_width=1000)
    left_out: list[str] = []
    narrow = False
    while True:
        table = _table(columns, of, style, narrow=narrow)
        least = max(columns, key=lambda column: column.drop)
        fits = to.measure(table, options=unlimited).maximum <= to.width
        if fits or (narrow and not least.drop):
            return table, left_out
        if narrow:
            columns.remove(least)
            left_out.append(least.heading.replace("\n", " "))
        narrow = True


def _table(
    columns: Sequence[Column[T]],
    of: Sequence[T],
    style: Callable[[T], str | None],
    *,
    narrow: bool,
) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    padding = (0, 1 if narrow else 2, 0, 0)
    table = Table(box=box.SIMPLE_HEAD, padding=padding, pad_edge=False)
    for column in columns:
        table.add_column(
            column.heading, justify="left" if column.left else "right", vertical="bottom",
            no_wrap=not column.wraps, overflow="fold",
        )  # fmt: skip
    for line in of:
        cells = [column.text(line) for column in columns]
        if narrow:
            cells = [cell.replace(" ± ", "±") for cell in cells]
        table.add_row(*map(Text, cells), style=style(line))
    return table


def aligned(rows: Iterable[Sequence[str]], width: int | None = None) -> Iterator[str]:
    """Indent rows of text, and line up all columns but the last.

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
