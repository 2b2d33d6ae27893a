"""Clocks for short calls, on a CPU and on a GPU.

Calls take turns: what disturbs the machine disturbs all of them, so the ratio of two neighbours'
times holds where neither time does.
"""

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

__all__ = ["Call", "CallTime", "clock", "launches", "take_turns"]

Call = Callable[[], object]

FLUSH_BYTES = 2**28  # more than any L2 cache has
TRIES = 3


class CallTime(NamedTuple):
    """One timed call; ``host_ms`` until it returned."""

    ms: float
    host_ms: float


def take_turns(
    calls: Mapping[str, Call], repeats: int, device: torch.device
) -> dict[str, list[CallTime]]:
    """Time every call ``repeats`` times, one after the other and not one many times.

    The order is drawn anew for each turn: who follows a provider of small needs finds the tensors
    in the cache, and memory that was just given back.
    """
    time_once = clock(device)
    taken: dict[str, list[CallTime]] = {name: [] for name in calls}
    draw = random.Random(0)  # the same order in each run
    for _ in range(repeats):
        for name in draw.sample(list(calls), len(calls)):
            taken[name].append(time_once(calls[name]))
    return taken


def clock(device: torch.device) -> Callable[[Call], CallTime]:
    """What times a call: the host's clock; CUDA events, with the L2 cache overwritten before.

    The GPU overwrites it as often as keeps it at work until the host has issued the whole call:
    else ``ms`` would be the host's time again. What waits for the GPU itself never gets ahead.
    """
    if device.type != "cuda":
        return _time_on_host
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def timed(call: Call, flushes: int) -> CallTime:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        for _ in range(flushes):
            flush.zero_()
        start.record()
        host_ms = _time_on_host(call).ms
        stop.record()
        stop.synchronize()
        return CallTime(start.elapsed_time(stop), host_ms)

    timed(flush.zero_, 1)
    flush_ms = timed(flush.zero_, 1).ms
    expected: dict[Call, float] = {}

    def time_on_gpu(call: Call) -> CallTime:
        for _ in range(TRIES):
            flushes = 1 + math.ceil(1.5 * expected.get(call, 0.0) / flush_ms)
            taken = timed(call, flushes)
            expected[call] = max(taken.host_ms, expected.get(call, 0.0))
            if taken.host_ms < (flushes - 0.5) * flush_ms:
                break
        return taken

    return time_on_gpu


def _time_on_host(call: Call) -> CallTime:
    begin = time.perf_counter()
    call()
    ms = 1000 * (time.perf_counter() - begin)
    return CallTime(ms, ms)


def launches(call: Call) -> int:
    """Count the kernels of a call, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(
        str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset"))
        for event in profiler.events()
    )
