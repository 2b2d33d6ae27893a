"""Confidence intervals of means and ratios, by Student's t (`scipy.stats`).

`judge` is the rule by which a level loses accuracy, or does not: its differences from a control
over some seeds, an interval from the spread of all levels that is corrected for their number
(Bonferroni), and a margin that may be lost.
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
    "Pairs",
    "interval",
    "judge",
    "percentile",
]

LEAST = 3  # values; of two, t's interval is 13 times as wide as their distance
CONFIDENCE = 0.95
EQUAL = 1e-9  # a spread that is rounding alone
POWER = 0.8  # with which as many seeds as are named would tell
MOST_SEEDS = 200  # more is no advice


Pairs = Sequence[tuple[float, float]]
"""Of each seed the value of a level and that of its control."""


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
    pairs: Pairs,
    margin: float,
    *,
    among: Sequence[Pairs] = (),
    comparisons: int = 1,
    planned: int = 0,
    least_sd: float = 0.0,
) -> Judged | None:
    """Judge the mean difference of a level from its control; ``None`` of fewer than three seeds.

    The spread is pooled over all levels that have the control in common: few seeds know too little
    of one level's. It is estimated twice, of the differences and, as Dunnett's test does, of the
    values; the wider interval counts. Spreads of zero say nothing, if `least_sd` does not.

    Args:
        pairs: Of a level and the control, the values of each seed; larger is better.
        margin: How much may be lost.
        among: The pairs of each level that computes something else, this one's among them.
        comparisons: How many are judged side by side. The interval has a confidence of
            ``1 - 0.05 / comparisons``, so that all of them contain the truth in 95 % of pages.
        planned: Seeds that were asked for: so many more are not advised, some of them failed.
        least_sd: The standard deviation of differences is not taken to be less: rounding to a
            whole sample can make all of them equal.
    """
    import numpy as np

    if not _enough(pairs):
        return None
    error, count = 0.05 / comparisons, len(pairs)
    pooled = [np.array(each) for each in among if _enough(each)] or [np.array(pairs)]
    groups, least = len(pooled), min(map(len, pooled)) - 1
    # The differences have the control in common: Satterthwaite's degrees of freedom are fewer.
    freedom = 4 * groups / (groups + 3) * least
    control = max(pooled, key=len)[:, 1]
    values = [each[:, 0] for each in pooled] + [control]
    estimates = [
        (_pooled_sd([each[:, 0] - each[:, 1] for each in pooled]), freedom),
        (math.sqrt(2) * _pooled_sd(values), (groups + 1) * least),
    ]
    if max(least_sd, estimates[0][0]) < EQUAL:
        return None
    half = max(_t(1 - error / 2, df) * max(sd, least_sd) for sd, df in estimates)
    half /= math.sqrt(count)
    mean = float(np.mean([mine - theirs for mine, theirs in pairs]))
    found = Judged(Interval(mean, mean - half, mean + half), margin, count, None)
    if found.fine or found.worse:
        return found
    sd = half * math.sqrt(count) / _t(1 - error / 2, count - 1)
    needed = _needed(abs(margin + mean), sd, error)
    needed = None if needed is None else max(needed, count + 1)
    return Judged(found.interval, margin, count, needed if needed and needed > planned else None)


def _enough(pairs: Pairs) -> bool:
    return len(pairs) >= LEAST and all(math.isfinite(value) for both in pairs for value in both)


def _pooled_sd(samples: Sequence[Any]) -> float:
    """Give the standard deviation that samples with means of their own have in common."""
    squares = sum(float(((sample - sample.mean()) ** 2).sum()) for sample in samples)
    return math.sqrt(squares / sum(len(sample) - 1 for sample in samples))


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
    value = float(np.mean(log_ratios))
    half = _t((1 + CONFIDENCE) / 2, count - 1) * float(np.std(log_ratios, ddof=1))
    half /= math.sqrt(count)
    return Interval(value, value - half, value + half).exp


@cache
def _t(probability: float, freedom: float) -> float:
    from scipy import stats  # type: ignore[import-untyped]

    return float(stats.t.ppf(probability, freedom))


def percentile(values: Any, percent: float) -> float | None:
    """Interpolate linearly between the two nearest ranks; ``None`` of nothing."""
    import numpy as np

    return float(np.percentile(values, percent)) if len(values) else None
