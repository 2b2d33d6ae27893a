"""Output of amp: the ``apex.amp`` logger, on rank 0 only.

If the application has configured no handler for that logger, lines are written to the current
``sys.stdout`` without a prefix, because scripts read them there.
"""

from __future__ import annotations

import logging
import sys

import torch

logger = logging.getLogger("apex.amp")


def is_rank0() -> bool:
    """Whether this process is rank 0, or not part of a process group."""
    distributed = torch.distributed
    has_group = distributed.is_available() and distributed.is_initialized()
    return not has_group or distributed.get_rank() == 0


def say(message: str, level: int = logging.INFO) -> None:
    """Log ``message`` on rank 0, or write it to stdout when nobody configured logging."""
    if not is_rank0():
        return
    if logger.hasHandlers():
        logger.log(level, message)
    elif sys.stdout is not None:  # the caller may have closed it: >&-
        sys.stdout.write(message + "\n")
