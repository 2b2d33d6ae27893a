"""What the timing programs share: ways that take turns, their clock, and the numbers of a row.

The clock is the CPU time of the thread, in which other programs count less, unless a way computes
or waits elsewhere.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from apex.commands.info.clocks import Call, take_turns

__all__ = ["Call", "Spread", "one_core", "ratio", "spread", "take_turns", "timed"]


class Spread(NamedTuple):
    """The median of some numbers, its 95 % interval from order statistics, and their quartiles."""

    median: float
    low: float
    high: float
    q1: float
    q3: float

    def __str__(self) -> str:
        """The median and the quartiles."""
        return f"{self.median:.2f} [{self.q1:.2f} {self.q3:.2f}]"


def one_core() -> None:
    """Compute in one thread, on one core that later processes inherit; Linux only."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def timed(call: Call, calls: int = 1, clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds of a call, on the average of several."""
    begin = clock()
    for _ in range(calls):
        call()
    return (clock() - begin) / calls


def spread(values: Iterable[float]) -> Spread:
    """Describe some numbers, of which there is at least one."""
    found = sorted(values)
    count = len(found)
    reach = 0.98 * count**0.5
    low = found[max(0, int(count / 2 - reach))]
    high = found[min(count - 1, int(count / 2 + reach))]
    q1, median, q3 = statistics.quantiles(found if count > 1 else found * 2, n=4)
    return Spread(median, low, high, q1, q3)


def ratio(some: Sequence[float], others: Sequence[float]) -> Spread:
    """Describe the ratios of neighbours: times of two ways, round by round."""
    return spread(a / b for a, b in zip(some, others, strict=True))
