"""Is a level worth it: a level beside another, over seeds, in numbers.

*Speed.* Both levels took turns in one process, so a seed gives one ratio: the median over pairs of
rounds of the ratio of their median step times. The interval over the seeds is Student's t. Where
the machine was busy, or the interval spans a factor of two, there is no verdict.

*Quality.* The rule is `apex.bench.intervals.judge`: differences paired by seed, an interval that is
corrected for the number of levels, and a margin. It is applied to the accuracy, to the mean loss on
the test set, which is finer, and to the training loss where a task has neither.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apex.bench.intervals import Interval, Judged, interval, judge
from apex.bench.training.results import Results, Run
from apex.bench.training.rows import BASELINE, LevelRow, rows

__all__ = [
    "BUSY",
    "LOSS_MARGIN",
    "Verdict",
    "baseline_of",
    "paired_ratio",
    "same_arithmetic",
    "verdicts",
]

NOISY = 2.0  # upper over lower end of an interval that says nothing
LOSS_MARGIN = 0.05  # relative: how much larger a loss may be
LEAST_SAMPLES = 3  # of a test set, that a margin is never below
BUSY = "too noisy: something else is using this machine"


@dataclass(frozen=True)
class Verdict:
    """A level against another at the same task and batch size."""

    row: LevelRow
    other: LevelRow
    """O0, or torch's own autocast in the same dtype."""
    speed: Interval | None
    """Step time of the other divided by this one's: above 1 is faster. ``None`` of fewer than three
    seeds, or where `noise` says why."""
    ratio: float | None
    """The same without an interval, of the seeds that there are."""
    seeds: int
    """That were compared."""
    noise: str | None
    memory: float | None
    """Peak memory divided by the other's: below 1 is less."""
    accuracy: Judged | None
    """Points of accuracy, this level's minus the other's."""
    loss: Judged | None
    """Logarithm of the other's loss divided by this one's: above 0 is better."""
    loss_of: str
    """``test loss`` or ``training loss``."""
    each_speed: tuple[float, ...]
    """Of each seed, the logarithm of `ratio`."""
    each_accuracy: tuple[float, ...]
    each_loss: tuple[float, ...]
    """Of each seed, what `accuracy` and `loss` judge."""
    same: bool
    """Whether all losses are the same numbers: the same arithmetic."""
    same_as: str | None
    """An earlier level against the same other, whose losses are the same numbers."""


def verdicts(report: Results) -> list[Verdict]:
    """Compare each row with O0 and with torch's own autocast, in the order of the rows."""
    table = rows(report)
    pairs = [(row, other) for row in table for other in _others(row, table)]
    levels = sum(other.level == BASELINE for _, other in pairs)
    return [
        _verdict(row, other, max(1, levels), _same_as(row, other, table)) for row, other in pairs
    ]


def baseline_of(row: LevelRow, among: Sequence[LevelRow]) -> LevelRow | None:
    """Find the row of O0, TF32 off where that is a choice, at the same task and batch size."""
    labels = (BASELINE, f"{BASELINE} TF32 off")
    same = (r for r in among if (r.task, r.batch) == (row.task, row.batch))
    return next((r for r in same if r.label in labels), None)


def _others(row: LevelRow, among: Sequence[LevelRow]) -> list[LevelRow]:
    """Find what a row is compared with: O0 with TF32 off and on, and autocast in its dtype."""
    if row.level == BASELINE:  # with TF32 on against off; the baseline against nothing
        base = baseline_of(row, among)
        return [] if base is None or base.label == row.label else [base]
    same = [r for r in among if (r.task, r.batch) == (row.task, row.batch)]
    native = f"native-{row.dtype}{row.label.removeprefix(row.level)}"
    return [
        *(r for r in same if r.level == BASELINE),
        *(r for r in same if r.label == native and not row.level.startswith("native-")),
    ]


def same_arithmetic(of: Sequence[LevelRow]) -> list[list[LevelRow]]:
    """Put the rows of a task and batch size together whose losses are the same numbers."""
    found: dict[Any, list[LevelRow]] = {}
    for row in of:
        if row.finished:
            found.setdefault(_losses(row), []).append(row)
    return [same for same in found.values() if len(same) > 1]


def _same_as(row: LevelRow, other: LevelRow, among: Sequence[LevelRow]) -> str | None:
    """Name the first row that is compared with the same other and has the same losses."""
    for one in among:
        if one is row:
            return None
        if other in _others(one, among) and one.finished and _losses(one) == _losses(row):
            return one.label
    return None


def _losses(row: LevelRow) -> Any:
    return tuple((run.cell.seed, run.losses) for run in row.finished)


# --- numbers -------------------------------------------------------------------------------------


def _verdict(row: LevelRow, other: LevelRow, comparisons: int, same_as: str | None) -> Verdict:
    pairs = _paired(row, other)
    logs = [log for mine, theirs in pairs if (log := paired_ratio(mine, theirs)) is not None]
    speed, noise = interval(logs), None
    if row.stopped or other.stopped or any(len(run.blocks) < 2 for both in pairs for run in both):
        speed = None  # of a few steps, the first
    elif row.unsteady or other.unsteady or (speed and speed.high > NOISY * speed.low):
        speed, noise = None, BUSY
    quality = [both for both in pairs if _as_long(*both)]
    margin, least_sd = _margin(row)
    points = [m.accuracy[-1] - t.accuracy[-1] for m, t in quality if m.accuracy and t.accuracy]
    counts = {"comparisons": comparisons, "planned": len(row.cells)}
    accuracy = judge(points, margin, least_sd=least_sd, **counts)
    loss_of = "test loss" if row.test_losses else "training loss"
    differences = [_log_loss(t) - _log_loss(m) for m, t in quality]
    loss = judge(differences, math.log(1 + LOSS_MARGIN), **counts)
    return Verdict(
        row=row,
        other=other,
        speed=speed,
        ratio=math.exp(statistics.fmean(logs)) if logs else None,
        seeds=len(logs),
        noise=noise,
        memory=row.peak_bytes / other.peak_bytes if row.peak_bytes and other.peak_bytes else None,
        accuracy=accuracy,
        loss=None if row.accuracies and not row.test_losses else loss,
        loss_of=loss_of,
        each_speed=tuple(logs),
        each_accuracy=tuple(points),
        each_loss=tuple(differences),
        same=bool(row.finished) and _losses(row) == _losses(other),
        same_as=same_as,
    )


def _as_long(mine: Run, theirs: Run) -> bool:
    """Whether both came to their end after as many steps, so that their quality is comparable."""
    return mine.finished and theirs.finished and len(mine.losses) == len(theirs.losses)


def _paired(row: LevelRow, other: LevelRow) -> list[tuple[Run, Run]]:
    """Pair the runs of a seed, those that took turns if there are such.

    A level of which every run diverged is not worth a time: no pairs.
    """
    if all(run.status == "diverged" for run in row.runs):
        return []
    found = {}
    for mine in row.timed:
        for theirs in other.timed:
            if theirs.cell.seed == mine.cell.seed and theirs.step_ms and mine.step_ms:
                beside = mine.together == theirs.together
                if beside or mine.cell.seed not in found:
                    found[mine.cell.seed] = mine, theirs
    return list(found.values())


def paired_ratio(mine: Run, theirs: Run) -> float | None:
    """Give the logarithm of their time of a step over mine.

    Rounds come in pairs of opposite order; the median over the pairs counts. Trainings that were
    not in one process have no rounds in common: then it is the ratio of the medians.
    """
    if mine.status == "stopped" or theirs.status == "stopped":
        # All that a run has that was stopped; its first step made the optimizer's state.
        first, other = (
            run.step_ms[1 : run.blocks[1] if len(run.blocks) > 1 else None]
            for run in (mine, theirs)
        )
        if not (first and other):
            return None
        return math.log(statistics.median(other) / statistics.median(first))
    rounds = [
        math.log(statistics.median(theirs_ms) / statistics.median(mine_ms))
        for mine_ms, theirs_ms in zip(mine.turns, theirs.turns, strict=False)
        if mine_ms and theirs_ms and statistics.median(mine_ms) > 0
    ]
    if mine.together != theirs.together and mine.counted_ms and theirs.counted_ms:
        medians = statistics.median(theirs.counted_ms), statistics.median(mine.counted_ms)
        rounds = [math.log(medians[0] / medians[1])]
    if not rounds:
        return None
    pairs = [statistics.fmean(rounds[i : i + 2]) for i in range(0, len(rounds) - 1, 2)]
    return statistics.median(pairs or rounds)


def _log_loss(run: Run) -> float:
    """Give the logarithm of the loss that is compared, nan where it has none."""
    found = run.test_loss[-1] if run.test_loss else run.final_loss
    return math.log(found) if found and 0 < found < math.inf else math.nan


def _margin(row: LevelRow) -> tuple[float, float]:
    """Give the margin in points, and the least standard deviation of a difference."""
    size = next((run.test_size for run in row.finished if run.test_size), None)
    sample = 100 / size if size else 0.0
    return max(row.report.margin, LEAST_SAMPLES * sample), sample / math.sqrt(2)
