"""Output of `apex selftest`: a progress bar, a table with a column for each path, JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from apex.bench.options import unique
from apex.bench.selftest.check import PATHS, Check, Measured, Setting
from apex.bench.selftest.run import Result

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["Bar", "as_json", "progress", "show"]

NOTHING = "—"


class Bar:
    """Where the run is, on standard error: a bar, or a line for each area in a log file."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)
        self._area = ""

    def begin(self, check: Check, setting: Setting) -> None:
        """Say which check comes."""
        name = f"{check.area}: {check.name} ({setting.path})"
        self._bar.update(self._task, description=name)
        if not self._bar.console.is_terminal and check.area != self._area:
            self._bar.console.print(check.area, markup=False)
        self._area = check.area

    def end(self, result: Result) -> None:
        """Say that it is over, and at once if it failed."""
        self._bar.advance(self._task)
        if result.status != "right":
            self._bar.console.print(_failure(result), style="red", markup=False)


@contextmanager
def progress(total: int) -> Iterator[Bar]:
    """Show how far ``total`` checks have come."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    to = Console(stderr=True, highlight=False, soft_wrap=True)
    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=to,
        transient=True,
        disable=not to.is_terminal,
    ) as bar:
        yield Bar(bar, total)


def show(to: Console, results: Sequence[Result], headings: dict[str, str]) -> None:
    """Print a table of each area, then everything that failed.

    Args:
        to: Where to.
        results: What came of the checks.
        headings: Of the columns, by path.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for area in unique(result.area for result in results):
        mine = [result for result in results if result.area == area]
        paths = [path for path in PATHS if any(result.path == path for result in mine)]
        table = Table(title=area, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("check")
        for path in paths:
            table.add_column(headings[path])
        for name in unique(result.name for result in mine):
            found = {result.path: result for result in mine if result.name == name}
            cells = [_cell(found[path]) if path in found else NOTHING for path in paths]
            bad = any(result.status != "right" for result in found.values())
            table.add_row(*map(Text, (name, *cells)), style="red" if bad else None)
        to.print(table)
    failed = [result for result in results if result.status != "right"]
    for result in failed:
        to.print(_failure(result), style="red", markup=False)


def _cell(result: Result) -> str:
    if result.status == "raised":
        return "RAISED"
    worst = result.worst
    said = NOTHING if worst is None else _number(worst)
    return said if result.status == "right" else f"WRONG: {said}"


def _number(one: Measured) -> str:
    """Show the value, what is allowed and the unit; a count of nothing is said in one word."""
    if one.allowed is None:
        return f"{one.value:.3g} {one.unit}".rstrip()
    if one.allowed == 0 and one.right:
        return "exact"
    return f"{one.value:.3g} of {one.allowed:.3g} {one.unit}".rstrip()


def _failure(result: Result) -> str:
    name = f"{result.area}: {result.name} ({result.path})"
    if result.error:
        return f"RAISED  {name}: {result.error.strip().splitlines()[-1]}"
    wrong = [f"{one.what}: {_number(one)}" for one in result.measured if not one.right]
    return f"WRONG  {name}: {'; '.join(wrong) or 'nothing was measured'}"


def as_json(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Turn results into dicts, lists, strings and numbers."""
    return [
        {
            **vars(result),
            "seconds": round(result.seconds, 3),
            "measured": [{**one._asdict(), "right": one.right} for one in result.measured],
        }
        for result in results
    ]
