"""Processes that talk over gloo and answer jobs, with a limit on the time, so that a hang fails."""

import contextlib
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import pickle
import re
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

SECONDS = 600  # waiting for answers, all jobs of a ``Ranks`` together
# A collective that another rank never calls ends with this; on a busy machine one waited for 20 s.
COLLECTIVE = timedelta(seconds=60)


def without_gloo(text):
    """Ranks' output without the lines of torch 2.9's Gloo, whose pieces may mix with each other."""
    if "[Gloo]" not in text:
        return text
    return re.sub(r"^(.*\[Gloo\].*|.*(peer ranks|connected to).*|[\d ]*)\n", "", text, flags=re.M)


def processes():
    """How processes are started: on Linux from one that has imported torch, which takes seconds."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])
    return context


@contextlib.contextmanager
def alone(backend="gloo"):
    """A process group of this process."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _connect(path, count, rank):
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(path, count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=COLLECTIVE)


def _work(rank, jobs):
    """What each process runs: answer jobs until the process is killed."""
    torch.set_num_threads(1)
    while True:
        job = jobs.recv()
        try:
            answer = job(rank) if callable(job) else _connect(*job, rank)
        except Exception as error:  # noqa: BLE001  # the test is to see every error
            answer = Failed("".join(traceback.format_exception(error)[-8:]))
        jobs.send_bytes(pickle.dumps(answer))  # send() would put tensors into shared memory


def _first(job, args, more, rank):
    return job(rank, *args, **more)


def error_of(function, *args, **more):
    """Kind and text of the error that a call raises; empty if it raises none."""
    try:
        function(*args, **more)
    except Exception as error:  # noqa: BLE001  the test looks at it
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return ""


class Failed(str):
    """The traceback of a rank."""


class RankError(Exception):
    """A rank raised, died or did not answer in time."""


class Ranks:
    """Processes that talk over gloo. Use as a context manager.

    After an error the process group is made anew, because one rank may still have been in a
    collective. After a hang or the end of a process every ``run`` raises at once.
    """

    def __init__(self, folder, seconds=SECONDS, count=2):
        self._stores = ((str(folder / f"store{number}"), count) for number in itertools.count())
        self._left, self._broken = seconds, None
        context = processes()
        self._pipes, theirs = zip(*(context.Pipe() for _ in range(count)), strict=True)
        self._processes = [
            context.Process(target=_work, args=job, daemon=True) for job in enumerate(theirs)
        ]
        for process, pipe in zip(self._processes, theirs, strict=True):
            process.start()
            pipe.close()  # so that the end of the process ends the pipe

    def __enter__(self):
        self._ask(next(self._stores))
        return self

    def __exit__(self, *error):
        for process in self._processes:
            process.kill()
            process.join()

    def run(self, job, *args, **more):
        """What ``job(rank, *args, **more)`` returns on each rank; all can be pickled.

        Raises:
            RankError: A rank raised, which the text quotes, or there is no answer.
        """
        answers = self._ask(functools.partial(_first, job, args, more))
        errors = [f"rank {r}: {text}" for r, text in enumerate(answers) if isinstance(text, Failed)]
        if errors:
            self._ask(next(self._stores))
            raise RankError("\n".join(errors))
        return answers

    def _ask(self, job):
        if self._broken is None:
            try:
                return self._answers(job)
            except (EOFError, OSError, TimeoutError) as error:
                name = job.args[0] if isinstance(job, functools.partial) else job
                self._broken = f"{name}: {error or 'a process died'}"
                self.__exit__()
                raise RankError(self._broken) from None
        raise RankError(f"not run, because of an earlier job, {self._broken}")

    def _answers(self, job):
        began = time.monotonic()
        for pipe in self._pipes:
            pipe.send(job)
        found = {}
        while len(found) < len(self._pipes):
            left = self._left - (time.monotonic() - began)
            waiting = [pipe for pipe in self._pipes if pipe not in found]
            ready = multiprocessing.connection.wait(waiting, max(left, 0.0))
            if not ready:
                ranks = [self._pipes.index(pipe) for pipe in waiting]
                raise TimeoutError(f"ranks {ranks} hang; the seconds for all jobs are over")
            found.update((pipe, pickle.loads(pipe.recv_bytes())) for pipe in ready)
        self._left -= time.monotonic() - began
        return [found[pipe] for pipe in self._pipes]


def from_two(program, folder):
    """What ``program(store, rank, pipe)`` sends from one of two processes, which are ended then."""
    context = processes()
    here, there = context.Pipe()
    words = [(str(folder / "store"), rank, there) for rank in (0, 1)]
    both = [context.Process(target=program, args=one) for one in words]
    for process in both:
        process.start()
    try:
        assert here.poll(60)
        return here.recv()
    finally:
        for process in both:
            process.kill()
            process.join()
