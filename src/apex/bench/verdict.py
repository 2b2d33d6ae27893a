"""Is a level worth it: comparisons over seeds, with intervals, and one plain sentence for each.

Speed is compared by the logarithms of the median step times of runs with the same seed: a 95 %
interval of their mean, by Student's t below 20 pairs and by the bootstrap from there on
(`scipy.stats`). Fewer than three pairs give no interval and no verdict.
"""

from dataclasses import dataclass

from apex.bench.results import Report

__all__ = ["Interval", "Verdict", "verdicts"]


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """A level against another at the same task and batch size."""

    task: str
    batch: int
    label: str
    against: str
    """The other's label: that of O0, or of torch's own autocast in the same dtype."""
    pairs: int
    """Seeds at which both were measured."""
    speed: Interval | None
    """Step time of the other divided by this one's: above 1 is faster."""
    total: float | None
    """The same of the whole time for the epochs, data included."""
    memory: float | None
    """Peak memory divided by the other's: below 1 is less."""
    accuracy: Interval | None
    """Difference in points of accuracy, paired over seeds: above 0 is better."""
    inside: bool | None
    """Whether the mean accuracy lies where the mean of as many further runs of the other would."""
    sentence: str
    """Faster or slower, memory, accuracy, and the reason where it is known."""


def verdicts(report: Report) -> list[Verdict]:
    """Compare each row with O0 and with torch's own autocast, in the order of the rows."""
    raise NotImplementedError
