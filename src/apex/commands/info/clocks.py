"""Calls that take turns, and clocks for them, on a CPU and on a GPU.

What disturbs the machine disturbs neighbours alike, so the ratio of two neighbours' times holds
where neither time does. All calls that are timed are timed here: by `apex info`, by the programs in
benchmarks/, and by what tools/gpu/ measures.
"""

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch

__all__ = ["Call", "CallTime", "clock", "launches", "on_gpu", "take_turns"]

Call = Callable[[], object]
Name = TypeVar("Name")
Found = TypeVar("Found")

FLUSH_BYTES = 2**28  # more than any L2 cache has
TRIES = 3


class CallTime(NamedTuple):
    """One timed call, in ms: by the device, and ``host_ms`` and ``wall_ms`` by the host's clock.

    The host's time ends when the call returns, the wall time when its results are there.
    """

    ms: float
    host_ms: float
    wall_ms: float


def take_turns(
    ways: Mapping[Name, Callable[[], Found]],
    rounds: int,
    *,
    warm_up: int = 0,
    seconds: float = 0.0,
    shuffled: bool = False,
) -> dict[Name, list[Found]]:
    """Let each way measure itself once a round, and not one of them many times.

    Args:
        ways: Each measures itself once.
        rounds: How many, or more until ``seconds`` have passed.
        warm_up: Rounds before them, which are not counted.
        seconds: The least time that the counted rounds take together.
        shuffled: Draw the order of each round, the same in each run: who follows one of small needs
            finds the tensors in the cache, and memory that was just given back. Else every other
            round is reversed.
    """
    names, draw = [*ways], random.Random(0)
    taken: dict[Name, list[Found]] = {name: [] for name in names}
    for _ in range(warm_up):
        for name in names:
            ways[name]()
    number, end = 0, time.perf_counter() + seconds
    while number < rounds or time.perf_counter() < end:
        order = names if number % 2 == 0 else names[::-1]
        for name in draw.sample(names, len(names)) if shuffled else order:
            taken[name].append(ways[name]())
        number += 1
    return taken


def on_gpu(call: Call, calls: int = 1, before: Call = lambda: None) -> CallTime:
    """Time a call on the current CUDA device, on the average of several.

    Args:
        call: What is timed.
        calls: How often.
        before: Gives the GPU work, so that it is busy until the host has issued the calls.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    before()
    begin = time.perf_counter()
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    wall = time.perf_counter() - begin
    return CallTime(start.elapsed_time(stop) / calls, 1000 * host / calls, 1000 * wall / calls)


def clock(device: torch.device) -> Callable[[Call], CallTime]:
    """What times a call: the host's clock; CUDA events, with the L2 cache overwritten before.

    The GPU overwrites it as often as keeps it at work until the host has issued the whole call:
    else ``ms`` would be the host's time again. What waits for the GPU itself never gets ahead.
    """
    if device.type != "cuda":
        return _time_on_host
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def timed(call: Call, flushes: int) -> CallTime:
        with torch.cuda.device(device):
            return on_gpu(call, before=lambda: [flush.zero_() for _ in range(flushes)])

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
    return CallTime(ms, ms, ms)


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
