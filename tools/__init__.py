"""What developers run; in no wheel."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_without_reader"]

BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report it


@contextmanager
def quiet_without_reader() -> Iterator[None]:
    """Where nobody reads standard output any more (``| head``), end without a traceback.

    Not by the signal itself, which would leave temporary files.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
