"""Standard streams of a command: those that the caller has closed, and pipes that nobody reads."""

import os
import sys

__all__ = ["discard", "flush", "open_closed"]


def open_closed() -> None:
    """Open the standard streams that the caller has closed (``2>&-``) on the null device.

    Python has ``None`` for them. The next file to be opened would get the number of one, and what
    C libraries and processes that are started write to it would stand in that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(null, null == number)
            stream = open(null, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def flush() -> None:
    """Write what standard output has kept, unless the command (a script of the user's) closed it.

    Raises:
        BrokenPipeError: The reader has gone.
    """
    if sys.stdout is not None and not getattr(sys.stdout, "closed", False):
        sys.stdout.flush()


def discard() -> None:
    """Write to the null device from now on: the reader (``| head``) has gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(null, stream.fileno())
