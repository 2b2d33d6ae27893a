"""``--batch max``: the largest batch that fits into memory, for each level.

A child process tries a few steps under a limit of memory, with batches made of one batch of the
task repeated. The size is doubled until a try fails, and then halved in between until the answer
is known to one part in sixteen. What a child does is in `probe`.
"""

import dataclasses
from collections.abc import Callable

from apex.bench.training.results import Cell, Run
from apex.bench.training.tasks.task import TaskOptions
from apex.bench.training.worker import Job, Worker

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
    worker = Worker()
    try:
        run = worker.run(Job(cell, options, limit_bytes=limit_bytes))
    finally:
        worker.close()
    if run.error is not None and run.error.startswith("its process was ended by"):
        # A library that is refused memory may not survive it, oneDNN on some CPUs for one.
        return dataclasses.replace(run, status="out of memory")
    return run
