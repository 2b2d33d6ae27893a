"""How far a command is, on standard error: a bar with the time left, or lines in a log file."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Bar", "progress"]


class Bar:
    """Draws only when called, at most ten times a second: something is being timed meanwhile."""

    REDRAW_AFTER = 0.1  # seconds

    def __init__(self, bar: "Progress", total: int) -> None:
        self._bar = bar
        self._total = total
        self._ended = 0
        self._task = bar.add_task("measuring the machine", total=total)
        self._drawn = 0.0

    def doing(self, text: str) -> None:
        """Something begins."""
        self._bar.update(self._task, description=text)
        self._bar.refresh()

    def told(self, share: float) -> None:
        """What has begun is done to this share."""
        if time.monotonic() - self._drawn > self.REDRAW_AFTER:
            self._bar.update(self._task, completed=self._ended + share)
            self._bar.refresh()
            self._drawn = time.monotonic()

    def say(self, line: str) -> None:
        """Write a line above the bar."""
        self._bar.console.print(line, markup=False)

    def done(self, text: str, count: int = 1) -> None:
        """So many are over; a log file gets a line instead of a bar."""
        self._ended += count
        self._bar.update(self._task, completed=self._ended)
        if not self._bar.console.is_terminal:
            self.say(f"{self._ended}/{self._total}  {text}")


@contextmanager
def progress(total: int, count: str) -> Iterator[Bar]:
    """Show how much of ``total`` is done; ``count`` stands behind the bar, a format of rich's."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.TextColumn(count),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left:"),
        rich.TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        yield Bar(bar, total)
