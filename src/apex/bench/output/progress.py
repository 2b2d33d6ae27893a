"""How far a command is, on standard error: a bar with the time left, or lines in a log file."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from apex.bench.training.results import Cell, Run

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Bar", "Trainings", "progress"]


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

    def done(self, text: str) -> None:
        """It is over; a log file gets a line in place of a bar."""
        self._ended += 1
        self._bar.update(self._task, completed=self._ended)
        if not self._bar.console.is_terminal:
            self._bar.console.print(f"{self._ended}/{self._total}  {text}", markup=False)


class Trainings(Bar):
    """Of cells, and of searches for the largest batch."""

    _trained: Cell | None = None
    """The last cell that was begun."""

    def begun(self, cell: Cell) -> None:
        """A cell is trained now."""
        self._trained = cell
        self.doing(name_of(cell))

    def ended(self, run: Run) -> None:
        """A cell is over, well or not, or was finished before."""
        accuracy = f", {run.accuracy[-1]:.2f} % right" if run.accuracy else ""
        kept = "" if run.cell == self._trained else " (kept from an earlier run)"
        self.done(f"{name_of(run.cell)}: {run.error or run.status}{accuracy}{kept}")

    def tried(self, cell: Cell, batch: int) -> None:
        """A batch size is tried for ``--batch max``."""
        self.doing(f"{cell.task}, {cell.label}: does {batch} fit?")

    def found(self, cell: Cell, batch: int) -> None:
        """The largest batch of a level is known."""
        self.done(f"{cell.task}, {cell.label}: the largest batch that fits is {batch}")


AnyBar = TypeVar("AnyBar", bound=Bar)


@contextmanager
def progress(kind: type[AnyBar], total: int, count: str) -> Iterator[AnyBar]:
    """Show how much of something is done.

    Args:
        kind: The bar to make.
        total: How many there are.
        count: What stands behind the bar, a format of rich's ``task``.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn(count),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        yield kind(bar, total)


def name_of(cell: Cell) -> str:
    """Name a cell in a line."""
    return f"{cell.task}, {cell.label}, batch {cell.batch}, seed {cell.seed}"
