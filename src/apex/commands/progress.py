"""How far a command is, on standard error: a bar with the time left, or lines in a log file."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from apex.commands.tables import console

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Bar", "progress"]

REDRAW_AFTER = 0.1  # seconds


class Bar:
    """Draws only when called, at most ten times a second: something is being timed meanwhile."""

    def __init__(self, bar: "Progress", total: int) -> None:
        self._bar = bar
        self._total = total
        self._finished = 0
        self._task = bar.add_task("measuring the machine", total=total)
        self._drawn = 0.0

    def describe(self, text: str) -> None:
        """Say what begins."""
        self._bar.update(self._task, description=text)
        self._bar.refresh()

    def update(self, share: float) -> None:
        """Say how much is done of what has begun, in units of the total."""
        if time.monotonic() - self._drawn > REDRAW_AFTER:
            self._bar.update(self._task, completed=self._finished + share)
            self._bar.refresh()
            self._drawn = time.monotonic()

    def print(self, line: str) -> None:
        """Write a line above the bar."""
        self._bar.console.print(line, markup=False)

    def finish(self, text: str, count: int = 1) -> None:
        """Count so many as done; a log file gets a line instead of a bar."""
        self._finished += count
        self._bar.update(self._task, completed=self._finished)
        if not self._bar.console.is_terminal:
            self.print(f"{self._finished}/{self._total}  {text}")


@contextmanager
def progress(total: int, count: str) -> Iterator[Bar]:
    """Show how much of ``total`` is done; ``count`` stands behind the bar, a format of rich's."""
    from rich import progress as rich

    to = console(stderr=True)
    with rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.TextColumn(count),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left:"),
        rich.TimeRemainingColumn(),
        console=to,
        auto_refresh=False,
        transient=True,
        disable=not to.is_terminal,
    ) as bar:
        yield Bar(bar, total)
