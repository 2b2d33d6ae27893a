"""How far `apex bench` is, on standard error: a bar with the time left, or lines in a log file."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from apex.bench.results import Cell, Run

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Bar", "progress"]


class Bar:
    """Draws only when told, at most ten times a second: cells are being timed meanwhile."""

    REDRAW_AFTER = 0.1  # seconds

    def __init__(self, bar: "Progress", cells: int) -> None:
        self._bar = bar
        self._cells = cells
        self._ended = 0
        self._task = bar.add_task("measuring the machine", total=cells)
        self._drawn = 0.0

    def begun(self, cell: Cell) -> None:
        """A cell is trained now."""
        self._bar.update(self._task, description=name_of(cell))
        self._bar.refresh()

    def told(self, share: float) -> None:
        """The present cell is done to this share."""
        if time.monotonic() - self._drawn > self.REDRAW_AFTER:
            self._bar.update(self._task, completed=self._ended + share)
            self._bar.refresh()
            self._drawn = time.monotonic()

    def ended(self, run: Run) -> None:
        """A cell is over, well or not, or was finished before."""
        self._ended += 1
        self._bar.update(self._task, completed=self._ended)
        accuracy = f", {run.accuracy[-1]:.2f} % right" if run.accuracy else ""
        self._line(f"{name_of(run.cell)}: {run.error or run.status}{accuracy}")

    def tried(self, cell: Cell, batch: int) -> None:
        """A batch size is tried for ``--batch max``."""
        self._bar.update(self._task, description=f"{cell.task}, {cell.label}: does {batch} fit?")
        self._bar.refresh()

    def found(self, cell: Cell, batch: int) -> None:
        """The largest batch of a level is known."""
        self._ended += 1
        self._bar.update(self._task, completed=self._ended)
        self._line(f"{cell.task}, {cell.label}: the largest batch that fits is {batch}")

    def _line(self, text: str) -> None:
        if not self._bar.console.is_terminal:  # a log file gets a line in place of a bar
            self._bar.console.print(f"{self._ended}/{self._cells}  {text}", markup=False)


@contextmanager
def progress(plan: Sequence[Cell], search: Sequence[Cell]) -> Iterator[Bar]:
    """Show how far the cells of a plan, and searches for the largest batch, have come."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    cells = len(plan) + len(search)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:.1f} of {task.total} trainings"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        yield Bar(bar, cells)


def name_of(cell: Cell) -> str:
    """Name a cell in a line."""
    return f"{cell.task}, {cell.label}, batch {cell.batch}, seed {cell.seed}"
