"""Blocks in which nothing may make the host wait for a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

WARNED = "Synchronization debug mode is a prototype"  # a warning of set_sync_debug_mode


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Let everything raise that waits, or copies from pageable memory; then the mode is as before.

    torch warns of its own mode, which fails a suite in which warnings are errors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", WARNED)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
