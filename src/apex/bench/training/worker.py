"""A process that trains cells, so that one cell cannot disturb, or take down, another.

The parent sends jobs through a pipe and receives their progress. A child whose parent was killed
ends at once. Ctrl-C is the parent's business: it terminates its children.

To import PyTorch and its compiler, which its optimizers need, takes seconds. On Linux, for a CPU,
one process imports them (multiprocessing's fork server), and children are forked from it, which
takes milliseconds. CUDA's driver is not made for that, so there each child imports for itself.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from apex.bench.training.results import Cell, Run
from apex.bench.training.tasks.task import TaskOptions

__all__ = ["Job", "Worker"]

TELL_AFTER = 0.02  # of a training


@dataclass(frozen=True)
class Job:
    """What a child is asked for: to train a cell, or to try whether a batch fits."""

    cell: Cell
    options: TaskOptions
    alone: bool = True
    limit_bytes: int | None = None
    """Try a few steps of the cell under this limit of memory, and measure nothing."""


class Worker:
    """A child process; the first `run` starts it."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    def run(self, job: Job, told: Callable[[float], None] = lambda share: None) -> Run:
        """Carry out one job; a child that dies gives a run that failed, and is replaced."""
        if self._pipe is None:
            self._start(job.options.device)
        assert self._pipe is not None
        try:
            self._pipe.send(job)
            while True:
                message = self._pipe.recv()
                if isinstance(message, Run):
                    return message
                told(message)
        except (EOFError, OSError):
            return self._died(job.cell)

    def close(self) -> None:
        """End the child at once; whatever it was doing is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _start(self, device: torch.device) -> None:
        context: Any = multiprocessing.get_context(
            "spawn"
        )  # a fork would copy the parent's threads
        if device.type == "cpu" and sys.platform == "linux":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch._dynamo", "apex.bench.training.probe"])
        self._pipe, theirs = context.Pipe()
        args = theirs, dict(os.environ)
        self._process = context.Process(target=_serve, args=args, daemon=True)
        self._process.start()
        theirs.close()

    def _died(self, cell: Cell) -> Run:
        self._process.join()
        code = self._process.exitcode
        self.close()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            killed = code == -signal.SIGKILL  # also what a kernel without memory sends
            why = "; the machine may have run out of memory" if killed else ""
            error = f"its process was ended by {name}{why}"
        else:
            error = f"its process ended with exit code {code}"
        return Run(cell, "failed", error)


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    """Carry out jobs until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()  # a fork server has those of its own start
    os.environ.update(environment)
    # A daemon ends with its parent, and may have no children: a DataLoader's workers are such.
    multiprocessing.current_process().daemon = False
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what a task prints must not stand between the lines of the parent's report
    from apex.bench.cli import UsageError
    from apex.bench.training import cell as cells
    from apex.bench.training import tasks
    from apex.bench.training.probe import probe

    loaded: dict[str, Any] = {}
    while True:
        try:
            job: Job = pipe.recv()
        except (EOFError, OSError):
            return
        name, device = job.cell.task, job.options.device
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)  # graphs go to the current device
        try:
            if name not in loaded:
                loaded = {name: tasks.load(name, job.options)}
            if job.limit_bytes is not None:
                run = probe(job.cell, loaded[name], device, job.limit_bytes)
            else:
                told = _Teller(pipe)
                run = cells.train(job.cell, loaded[name], device, told, alone=job.alone)
        except UsageError as error:
            run = Run(job.cell, "failed", str(error))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the cells of other levels while this process waits
        try:
            pipe.send(run)
        except OSError:  # the parent is gone
            return


def _end_with_parent() -> None:
    """Wait until the parent is gone; then nobody wants what is trained."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Teller:
    """Tells the parent now and then: each message costs the training some microseconds."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._last = 0.0

    def __call__(self, share: float) -> None:
        if share - self._last >= TELL_AFTER:
            self._last = share
            self._pipe.send(share)
