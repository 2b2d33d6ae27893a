"""Run Python programs in processes that are forked from one that has imported torch.

A program spends 1.3 s of a processor on ``import torch`` and as much again on what optimizers
import. Processes whose start or end is what a test is about are started as users start them.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import pathlib
import runpy
import signal
import sys
import tempfile
import time
from unittest import mock

import torch

from tests.ranks import processes


def run(*commands, folder, environment, seconds, forks=True):
    """Run ``python`` with each list of words at the same time; codes, outputs and errors.

    What torchrun and torch.multiprocessing.spawn start in them is forked too, unless ``forks`` is
    false. All processes are ended after so many seconds.
    """
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as outputs, contextlib.ExitStack() as stack:
        jobs = []
        for number, words in enumerate(commands):
            files = [pathlib.Path(outputs, f"{number}.{name}") for name in ("out", "err")]
            what = (
                [str(word) for word in words],
                str(folder),
                environment,
                forks,
                *map(str, files),
            )
            process = processes().Process(target=_start, args=what)
            process.start()
            stack.callback(_end, process)
            jobs.append((process, *files))
        for process, *_ in jobs:
            process.join(max(end - time.monotonic(), 0.0))
        return [
            (process.exitcode, *(file.read_text() if file.exists() else "" for file in files))
            for process, *files in jobs
        ]


def _end(process):
    """End a process and those that it started: a launcher ends its own, the others are a group."""
    process.terminate()
    process.join(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not have made the group yet
    process.join()


def _start(words, folder, environment, forks, *files):
    """What the first process of a command runs."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()  # those of the server are of its own start
    os.environ.update(environment)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    multiprocessing.set_start_method(None, force=True)  # this process has that of the server
    torch.set_num_threads(1)  # OMP_NUM_THREADS was read when torch was imported
    with _forking(forks and sys.platform == "linux"):
        _program(*words)


def _forking(forks):
    """Let torch fork processes where it would start new ones."""
    stack = contextlib.ExitStack()
    if forks:
        from torch.distributed.launcher.api import elastic_launch

        fork = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
        stack.enter_context(mock.patch.object(torch.multiprocessing, "spawn", fork))
        begin = functools.partialmethod(_launch, elastic_launch.__init__)
        stack.enter_context(mock.patch.object(elastic_launch, "__init__", begin))
    return stack


def _launch(self, begin, config, entrypoint):
    """Begin torchrun's `elastic_launch`, whose agent can also start functions."""
    assert entrypoint == sys.executable
    config.start_method = "fork"
    begin(self, config, _program)


def _program(*words):
    """Become ``python`` with these words, up to what it does at its exit."""
    words = [word for word in words if word != "-u"]
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()
