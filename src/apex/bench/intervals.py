"""Confidence intervals of means and ratios, by Student's t (`scipy.stats`).

`judge` is the rule by which a level loses accuracy, or does not: the paired differences of some
seeds, an interval corrected for the number of levels (Bonferroni), and a margin that may be lost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = [
    "LEAST",
    "Interval",
    "Judged",
    "interval",
    "judge",
    "percentile",
]

LEAST = 3  # values; of two, t's interval is 13 times as wide as their distance
CONFIDENCE = 0.95
EQUAL = 1e-9  # a spread that is rounding alone
POWER = 0.8  # with which as many seeds as are named would tell
MOST_SEEDS = 200  # more is no advice


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval, of 95 % if nothing else is said."""

    value: float
    low: float
    high: float

    @property
    def exp(self) -> "Interval":
        """The ratio, of the interval of a logarithm."""
        return Interval(math.exp(self.value), math.exp(self.low), math.exp(self.high))


@dataclass(frozen=True)
class Judged:
    """What some seeds say of a difference, where above 0 is better.

    ``needed`` is about how many seeds would tell; ``None`` where these do, or none would.
    """

    interval: Interval
    margin: float
    seeds: int
    needed: int | None

    @property
    def fine(self) -> bool:
        """Whether it loses less than the margin, beyond doubt."""
        return self.interval.low > -self.margin

    @property
    def worse(self) -> bool:
        """Whether it loses at least the margin, beyond doubt."""
        return self.interval.high <= -self.margin


def judge(
    differences: Sequence[float],
    margin: float,
    *,
    comparisons: int = 1,
    planned: int = 0,
    least_sd: float = 0.0,
) -> Judged | None:
    """Judge the mean of paired differences; ``None`` of fewer than three, or of equal ones.

    Equal ones say nothing of their spread, if `least_sd` does not.

    Args:
        differences: Of a level minus the baseline, a seed each; above 0 is better.
        margin: How much may be lost.
        comparisons: How many are judged side by side. The interval has a confidence of
            ``1 - 0.05 / comparisons``, so that all of them contain the truth in 95 % of pages.
        planned: Seeds that were asked for: so many more are not advised, some of them failed.
        least_sd: The standard deviation is not taken to be less: rounding to a whole sample can
            make all differences equal.
    """
    import numpy as np

    count = len(differences)
    if count < LEAST or not all(map(math.isfinite, differences)):
        return None
    error = 0.05 / comparisons
    mean = float(np.mean(differences))
    sd = max(float(np.std(differences, ddof=1)), least_sd)
    if sd < EQUAL:
        return None
    around = _around(mean, sd / math.sqrt(count), count - 1, 1 - error)
    found = Judged(around, margin, count, None)
    if found.fine or found.worse:
        return found
    needed = _needed(abs(margin + mean), sd, error)
    needed = None if needed is None else max(needed, count + 1)
    return Judged(around, margin, count, needed if needed and needed > planned else None)


def _needed(distance: float, sd: float, error: float) -> int | None:
    """Seeds that with `POWER` put an interval on one side of a bound at this distance."""
    for count in range(LEAST, MOST_SEEDS + 1):
        reach = _t(1 - error / 2, count - 1) + _t(POWER, count - 1)
        if reach * sd / math.sqrt(count) <= distance:
            return count
    return None


def interval(log_ratios: Sequence[float]) -> Interval | None:
    """Estimate a ratio from the logarithms that pairs gave; ``None`` of fewer than three."""
    import numpy as np

    if (count := len(log_ratios)) < LEAST:
        return None
    error = float(np.std(log_ratios, ddof=1)) / math.sqrt(count)
    return _around(float(np.mean(log_ratios)), error, count - 1).exp


def _around(value: float, error: float, freedom: float, confidence: float = CONFIDENCE) -> Interval:
    half = _t((1 + confidence) / 2, freedom) * error
    return Interval(value, value - half, value + half)


@cache
def _t(probability: float, freedom: float) -> float:
    from scipy import stats  # type: ignore[import-untyped]

    return float(stats.t.ppf(probability, freedom))


def percentile(values: Any, percent: float) -> float | None:
    """Interpolate linearly between the two nearest ranks; ``None`` of nothing."""
    import numpy as np

    return float(np.percentile(values, percent)) if len(values) else None
