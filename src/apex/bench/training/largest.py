"""The largest batch that fits, by trying: each size in a process of its own (`probe`).

The size doubles until one fails, then what lies between is halved, up to a sixteenth.
"""

import dataclasses
from collections.abc import Callable

from apex.bench.training import jobs
from apex.bench.training.results import Cell, Run
from apex.bench.training.tasks.task import TaskOptions
from apex.bench.training.worker import Died, in_a_process

__all__ = ["largest"]

FIRST = 16
RESOLUTION = 1 / 16


def largest(
    cell: Cell,
    options: TaskOptions,
    limit_bytes: int,
    told: Callable[[int], None] = lambda batch: None,
) -> tuple[int, str | None]:
    """Find the largest batch of a cell that fits.

    Args:
        cell: Task, level, optimizer; its batch size is not looked at.
        options: Of the task.
        limit_bytes: What the training may take.
        told: Called with each size before it is tried.

    Returns:
        The size, 0 if not even one sample fits, and the error of a try that failed for another
        reason than memory.
    """
    fits, fails = 0, None
    batch = FIRST
    while fails is None or fails - fits > max(1, RESOLUTION * fits):
        told(batch)
        run = _try(dataclasses.replace(cell, batch=batch), options, limit_bytes)
        if run.status == "failed":
            return fits, run.error
        if run.status == "out of memory":
            fails = batch
        else:
            fits = batch
        batch = 2 * fits if fails is None else (fits + fails) // 2
        if batch == 0:
            break
    return fits, None


def _try(cell: Cell, options: TaskOptions, limit_bytes: int) -> Run:
    try:
        found: Run = in_a_process(jobs.fits, cell, options, limit_bytes, device=options.device)
    except Died as error:
        # A library that is refused memory may not survive it, oneDNN on some CPUs for one.
        ended = str(error).startswith("its process was ended by")
        return Run(cell, "out of memory" if ended else "failed", str(error))
    return found
