"""The names of `torch.cuda` that checks and times use, on a CPU: ``--dry`` runs their code.

Nothing is captured and nothing waits. `Captured` runs its work again instead of a replay, so that
numbers are compared in a dry run as well.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch


class Stream:
    """A stream on which everything has happened already."""

    cuda_stream = 0

    def __init__(self, *arguments: Any) -> None:
        pass

    def nothing(self, *arguments: Any) -> None:
        """Wait for nothing."""

    wait_stream = synchronize = nothing


class Graph:
    """A graph that holds nothing."""

    def nothing(self, *arguments: Any, **options: Any) -> None:
        """Record nothing."""

    capture_begin = capture_end = replay = pool = nothing


class Event:
    """The time at which the host recorded it."""

    def __init__(self, **options: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        """Look at the clock."""
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds until another."""
        return (end.at - self.at) * 1e3


def install() -> None:
    """Put the stand-ins in place, for the rest of this process."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.CUDAGraph, cuda.Event = Stream, Graph, Event
    cuda.graph = cuda.stream = lambda *arguments, **options: contextlib.nullcontext()
    cuda.current_stream = Stream
    for name in ("synchronize", "set_sync_debug_mode", "empty_cache", "_sleep", "set_device"):
        setattr(cuda, name, lambda *arguments: None)
    for name in ("reset_peak_memory_stats", "memory_reserved", "max_memory_allocated"):
        setattr(cuda, name, lambda *arguments: 0)
    cuda.get_device_name = lambda *arguments: "dry"
