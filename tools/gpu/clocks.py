"""How long the GPU takes for a call, and how long somebody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

CALLS = 10
PAUSE = 60_000_000  # cycles, 30 ms: ten forwards and backwards take the host 5 to 12 ms on an H200


def gpu_ms(work: Callable[[], Any]) -> float:
    """Of a call, queued behind a pause of the GPU, so that it never waits for the host."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda._sleep(PAUSE)
    ends[0].record()
    for _ in range(CALLS):
        work()
    ends[1].record()
    torch.cuda.synchronize()
    return ends[0].elapsed_time(ends[1]) / CALLS


def wall_ms(work: Callable[[], Any]) -> float:
    """Of a call, on the clock, until the GPU has done all of them."""
    begun = time.perf_counter()
    for _ in range(CALLS):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3 / CALLS
