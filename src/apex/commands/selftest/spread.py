"""Checks in several processes: most of the time on a GPU goes into compiling kernels.

They share Triton's cache of compiled kernels, a folder. Checks that launch the same kernels go to
one process, one after the other, so that no kernel is compiled twice. A process gets one check at
a time: if it dies or takes too long, that check has failed, and another process goes on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import torch

from apex.commands.processes import end_with_parent, how_it_ended
from apex.commands.selftest.check import Planned, Result, carry_out, is_lost

__all__ = ["LIMITS", "processes_for", "serially", "spread"]

Begin = Callable[[int], None]  # called with the number of a check that begins
Numbered = Generator[tuple[int, Result], None, None]  # results by the numbers of their checks

NO_NUMPY = "ignore:Failed to initialize NumPy:UserWarning"  # torch's own, where there is none
MOST = 8  # processes
GPU_BYTES = 2 * 2**30  # of a GPU for each: CUDA's context, and tensors of some hundred MB
# Seconds for a check, by type of device. Triton's interpreter took 140 s for a training on a CPU
# with other work.
LIMITS = {"cpu": 1800.0, "cuda": 300.0}
START = 300.0  # seconds until a process has imported torch and begins its first
MOST_LOST = 10  # processes that end by themselves, after which the run ends


def processes_for(device: torch.device) -> int:
    """One process for each core, at most 8, and at most one for each 2 GiB of the GPU's memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = min(cores or 1, MOST)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        found = min(found, memory // GPU_BYTES)
    return max(found, 1)


def serially(planned: Sequence[Planned], begin: Begin) -> Numbered:
    """Carry the checks out one after the other, in this process."""
    for number, (check, setting) in enumerate(planned):
        begin(number)
        result = carry_out(check, setting)
        yield number, result
        if result.status == "raised" and is_lost(setting.device):
            return


def spread(
    plan: Callable[[], list[Planned]], begin: Begin, processes: int, limit: float
) -> Numbered:
    """Carry the checks out in so many processes.

    Args:
        plan: What makes the list of checks, here and in each process; it can be pickled.
        begin: Called with the number of a check that begins.
        processes: How many there are at a time.
        limit: Seconds for a check. One that takes longer has failed.
    """
    planned = plan()
    waiting = _groups(planned)
    threads = max(1, torch.get_num_threads() // processes)
    workers = [_Worker(plan, threads) for _ in range(min(processes, len(waiting)))]
    lost = 0
    try:
        while lost < MOST_LOST:
            for worker in workers:
                worker.give(waiting, begin)
            busy = {worker.pipe: worker for worker in workers if worker.number is not None}
            if not busy:
                return
            until = min(worker.until for worker in busy.values())
            ready = wait(list(busy), max(0.0, until - time.monotonic()))
            for pipe, worker in busy.items():
                if pipe not in ready and time.monotonic() < worker.until:
                    continue
                found = worker.answer(planned, limit)
                if found is None:
                    continue
                yield found.number, found.result
                if found.gone:
                    lost += 1
                    workers[workers.index(worker)] = worker.replaced()
    finally:
        for worker in workers:
            worker.end()


def _groups(planned: Sequence[Planned]) -> deque[list[int]]:
    """The numbers of the checks, those of one subject together."""
    found: dict[str, list[int]] = {}
    for number, (check, _) in enumerate(planned):
        found.setdefault(check.subject or check.name, []).append(number)
    return deque(found.values())


class _Answer(NamedTuple):
    """What came of a check, and whether its process is of no use any more."""

    number: int
    result: Result
    gone: bool


class _Worker:
    """A process, and what it does.

    Attributes:
        number: The check that it carries out, if any.
        until: When this has to be done, on the monotonic clock.
    """

    def __init__(
        self, plan: Callable[[], list[Planned]], threads: int, left: Sequence[int] = ()
    ) -> None:
        self._plan, self._threads, self._left = plan, threads, deque(left)
        self.number: int | None = None
        self.until, self._given, self._allowed = 0.0, 0.0, START
        context = multiprocessing.get_context("spawn")  # a fork has no CUDA, and locked locks
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, plan, threads), daemon=True)
        with _without_main():
            self._process.start()
        theirs.close()

    def give(self, waiting: deque[list[int]], begin: Begin) -> None:
        """Have it begin the next check, if it has none and one is left."""
        if self.number is not None or not (self._left or waiting):
            return
        self._left = self._left or deque(waiting.popleft())
        self.number, self._given = self._left.popleft(), time.monotonic()
        self._allowed, self.until = START, self._given + START
        begin(self.number)
        with suppress(OSError):  # it has died meanwhile, which `answer` notices
            self.pipe.send(self.number)

    def answer(self, planned: Sequence[Planned], limit: float) -> _Answer | None:
        """What came of its check; nothing yet, if it only says that it begins."""
        number = self.number
        assert number is not None
        try:
            if self.pipe.poll():
                came = self.pipe.recv()
                if came is None:
                    self._allowed, self.until = limit, time.monotonic() + limit
                    return None
                self.number = None
                return _Answer(number, *came)
            error = f"not finished in {self._allowed:.0f} s: its process was ended"
        except (EOFError, OSError):
            self._process.join()
            error = how_it_ended(self._process.exitcode)
        (check, setting), seconds = planned[number], time.monotonic() - self._given
        result = Result(check.area, check.name, setting.path, (), seconds, error, ())
        return _Answer(number, result, gone=True)

    def replaced(self) -> _Worker:
        """Another process, which goes on with what is left of the same kernels."""
        self.end()
        return _Worker(self._plan, self._threads, self._left)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


@contextmanager
def _without_main() -> Iterator[None]:
    """Let a process start without importing the program's main module.

    No check is in it, and it cannot be imported where it is a REPL or standard input, or where it
    calls this without asking for its ``__name__``. What the ``apex`` script does before it imports
    torch, which is to ignore a warning, the process gets as its option ``-W``.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.warnoptions.append(NO_NUMPY)
    try:
        yield
    finally:
        sys.warnoptions.remove(NO_NUMPY)
        sys.modules["__main__"] = main


def _serve(pipe: Connection, plan: Callable[[], list[Planned]], threads: int) -> None:
    """Carry out checks as their numbers come."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what a check prints must not stand in the report
    torch.set_num_threads(threads)
    planned = plan()
    while True:
        check, setting = planned[pipe.recv()]
        pipe.send(None)
        result = carry_out(check, setting)
        pipe.send((result, result.status == "raised" and is_lost(setting.device)))
