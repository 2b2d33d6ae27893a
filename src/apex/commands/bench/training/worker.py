"""A process that trains, so that a training can neither disturb nor take down the command.

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
from multiprocessing.connection import Connection
from typing import Any

import torch

from apex.commands.processes import end_with_parent, how_it_ended

__all__ = ["Died", "in_a_process"]


class Died(Exception):
    """The process ended before it had answered; the message says how."""


def in_a_process(
    work: Callable[..., Any],
    *arguments: Any,
    device: torch.device,
    on_progress: Callable[..., None] | None = None,
) -> Any:
    """Call ``work(*arguments)`` in a process of its own and return its result.

    Args:
        work: A function of a module.
        arguments: All that can be pickled.
        device: Where it computes.
        on_progress: Called with what the process reports on its way: ``work`` gets a function of
            this name, too.

    Raises:
        Died: The process ended without a result.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its allocator warns of each profile
    # A fork would copy the parent's threads.
    context: Any = multiprocessing.get_context("spawn")
    if device.type == "cpu" and sys.platform == "linux":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "apex.commands.bench.training.plan"])
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, dict(os.environ)), daemon=True)
    process.start()
    theirs.close()
    try:
        pipe.send((work, device, arguments, on_progress is not None))
        while True:
            kind, message = pipe.recv()
            if kind == "result":
                return message
            if on_progress is not None:
                on_progress(*message)
    except (EOFError, OSError):
        process.join()
        raise Died(how_it_ended(process.exitcode)) from None
    finally:
        process.kill()
        process.join()
        pipe.close()


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    """Carry out one job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()  # a fork server has those of its own start
    os.environ.update(environment)
    # A daemon ends with its parent, and may have no children: a DataLoader's workers are such.
    multiprocessing.current_process().daemon = False
    # They start as in the user's program. As this process did, each would import torch, each epoch.
    multiprocessing.set_start_method(None, force=True)
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what a task prints must not stand between the lines of the parent's report
    try:
        work, device, arguments, reports = pipe.recv()
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)  # graphs go to the current device
        report = {"on_progress": lambda *words: pipe.send(("progress", words))} if reports else {}
        pipe.send(("result", work(*arguments, **report)))
    except (EOFError, OSError):  # the parent is gone
        return
