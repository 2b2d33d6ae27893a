"""The matrix of trainings: in which order they run, in which processes, and what a stop keeps.

All levels of a task, batch size and seed are a *group*: they take turns in one process (`turns`).
Seeds are the outermost loop, so an interrupted matrix has all levels at the first seeds. Each
finished group is a file in ``FOLDER/cells``, named by a digest of its cells and of all that their
numbers depend on; a matrix that finds the file takes it and trains nothing. Groups in which
something failed, or that other programs disturbed, are tried again.

What runs out of memory beside the others, or takes their process down, is trained once more beside
O0 alone, and then by itself.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from apex.commands.bench.training import tasks, turns
from apex.commands.bench.training.results import BUSY, Cell, Run, decode, disturbed
from apex.commands.bench.training.tasks.task import TaskOptions
from apex.commands.bench.training.warned import each_once
from apex.commands.bench.training.worker import Died, in_a_process
from apex.commands.command_line import UsageError
from apex.commands.tables import save

__all__ = ["Kept", "Store", "groups", "run_group"]

FORMAT = "apex bench group 1"
REPORT_AFTER = 0.01  # of the trainings: a message costs them some microseconds

OnProgress = Callable[..., None]
"""Gets the share that is done, a line or ``None``, and the place of the warning that the line is"""


def groups(cells: Sequence[Cell]) -> list[tuple[Cell, ...]]:
    """Put the cells together that take turns, in the order of the plan."""
    keyed = groupby(cells, lambda cell: (cell.seed, cell.task, cell.batch))
    return [tuple(group) for _, group in keyed]


class Store:
    """Finished groups, a file for each."""

    def __init__(self, folder: Path, environment: dict[str, Any], options: TaskOptions) -> None:
        """Keep groups in ``folder``, apart from those of other machines, versions and data."""
        self._folder = folder
        depends = {key: value for key, value in environment.items() if key != "date"}
        data = options.data and str(options.data.resolve())
        self._depends = json.dumps([depends, data], sort_keys=True, default=str)
        self._sources: dict[str, str] = {}

    def get(self, group: Sequence[Cell]) -> "Kept | None":
        """Return what is kept of a group if it was finished and other programs did not disturb it.

        A damaged file counts as nothing.
        """
        try:
            kept: Kept = decode(self._file(group).read_bytes(), Kept, FORMAT)
        except (OSError, ValueError):
            return None
        same = {run.cell for run in kept.runs} == set(group)
        failed = any(run.status == "failed" for run in kept.runs)
        return kept if same and not failed and disturbed(kept.runs) < BUSY else None

    def put(self, group: Sequence[Cell], kept: "Kept") -> None:
        """Keep a group, whole or not at all.

        Raises:
            UsageError: What it trained was edited since the first look at it: nobody knows which
                text was trained.
        """
        task = group[0].task
        if _text(task) != self._source(task):
            file = task.rpartition(":")[0]
            raise UsageError(f"{file} was changed while {task} was trained; run again")
        self._folder.mkdir(parents=True, exist_ok=True)
        save({"format": FORMAT, **dataclasses.asdict(kept)}, self._file(group))

    def forget(self, cells: Sequence[Cell]) -> None:
        """Delete what is kept of these cells."""
        for group in groups(cells):
            self._file(group).unlink(missing_ok=True)

    def _file(self, group: Sequence[Cell]) -> Path:
        cell = group[0]
        words = json.dumps([dataclasses.asdict(each) for each in group], sort_keys=True)
        text = "\0".join((FORMAT, words, self._depends, self._source(cell.task)))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        name = "".join(c if c.isalnum() else "-" for c in cell.task)
        return self._folder / f"{name[:60]}-{cell.batch}-{cell.seed}-{digest}.json"

    def _source(self, task: str) -> str:
        """Return the text of a user's task as it was at first: an edited one is another task."""
        return self._sources.setdefault(task, _text(task))


@dataclasses.dataclass(frozen=True)
class Kept:
    """A finished group."""

    runs: tuple[Run, ...]
    seconds: float
    """That it took."""


def _text(task: str) -> str:
    """Return the file of a user's task; what it imports needs ``--fresh``."""
    path, colon, _ = task.rpartition(":")
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace") if colon else ""
    except OSError:
        return ""


def run_group(
    group: Sequence[Cell],
    options: TaskOptions,
    on_progress: OnProgress,
    budget_s: float | None,
) -> list[Run]:
    """Train a group in a process of its own; what does not fit into it, in others.

    Returns:
        A run of each cell, and of O0 for each level that had to be trained beside it alone.
    """
    end = None if budget_s is None else time.monotonic() + budget_s
    runs = _together(group, options, on_progress, budget_s)
    found = [run for run in runs if not _again(run)]
    base = next((cell for cell in group if cell.level == "O0"), None)
    for run in runs:
        if not _again(run):
            continue
        tried = [run]
        beside = [(base, run.cell)] if base and base != run.cell and len(group) > 2 else []
        for cells in (*beside, *([(run.cell,)] if len(group) > 1 else [])):
            left = None if end is None else max(1.0, end - time.monotonic())
            tried = _together(cells, options, on_progress, left)
            if not any(_again(one) and one.cell == run.cell for one in tried):
                break
        found += tried
    return found


def _again(run: Run) -> bool:
    """Whether it may go better with fewer beside it; no memory may end a process by a signal."""
    died = run.status == "failed" and (run.error or "").startswith("its process was ended by")
    return died or run.status == "out of memory"


def _together(
    cells: Sequence[Cell],
    options: TaskOptions,
    on_progress: OnProgress,
    budget_s: float | None,
) -> list[Run]:
    try:
        # The clock is the system's: the start of the process counts, too.
        end = None if budget_s is None else time.monotonic() + budget_s
        found: list[Run] = in_a_process(
            _train, cells, options, end, device=options.device, on_progress=on_progress
        )
    except Died as error:
        together = tuple(cell.label for cell in cells)
        return [Run(cell, "failed", str(error), together) for cell in cells]
    return found


def _train(
    cells: Sequence[Cell], options: TaskOptions, end: float | None, on_progress: OnProgress
) -> list[Run]:
    """Train cells of one task, batch size and seed by turns, in the process of `_together`.

    ``end`` is when the time budget ends.
    """
    last = 0.0

    def warned(place: str, text: str) -> None:
        on_progress(last, text, place)

    def report(share: float, line: str | None) -> None:
        nonlocal last
        if line or share - last >= REPORT_AFTER:
            last = share
            on_progress(share, line)

    with each_once(warned):
        try:
            task = tasks.load(cells[0].task, options)
        except UsageError as error:
            return [Run(cell, "failed", str(error)) for cell in cells]
        left = None if end is None else end - time.monotonic()
        return turns.train(cells, task, options.device, report, left)
