"""What commands with processes of their own share: how one ended, and that none outlives them."""

from __future__ import annotations

import multiprocessing
import os
import signal

__all__ = ["end_with_parent", "how_it_ended"]


def how_it_ended(code: int | None) -> str:
    """Say it in words, from the exit code of a process: minus the signal, if one ended it."""
    if code is None or code >= 0:
        return f"its process ended with exit code {code}"
    killed = code == -signal.SIGKILL  # also what a kernel without memory sends
    why = "; the machine may have run out of memory" if killed else ""
    return f"its process was ended by {signal.Signals(-code).name}{why}"


def end_with_parent() -> None:
    """Wait until the parent is gone; then nobody wants what is computed. For a thread."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
