"""Is a level worth it: a level beside another, over seeds, in numbers.

*Speed.* Both levels took turns in one process, so a seed gives one ratio: the median over pairs of
rounds of the ratio of their median step times. The interval over the seeds is Student's t. Where
step times are uneven, the interval spans a factor of two, or other programs used the machine, there
is no verdict.

*Quality.* The rule is `judge` of ``intervals.py``: differences over the seeds, an interval that is
corrected for the number of comparisons, and a margin. Levels whose losses are the same numbers are
one comparison. The rule is applied to the accuracy, to the mean loss on the test set, which is
finer, and to the training loss where a task has neither.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from apex.commands.bench.intervals import Interval, Judged, Pairs, interval, judge
from apex.commands.bench.training.results import Results, Run
from apex.commands.bench.training.rows import BASELINE, LevelRow, rows

__all__ = [
    "LOSS_MARGIN",
    "NOISY",
    "UNEVEN",
    "Verdict",
    "baseline_of",
    "paired_ratio",
    "same_arithmetic",
    "verdicts",
]

NOISY = 2.0  # upper over lower end of an interval that says nothing
LOSS_MARGIN = 0.05  # relative: how much larger a loss may be
LEAST_SAMPLES = 3  # of a test set, that a margin is never below
UNEVEN = "the step times are too uneven"


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
    """Points of accuracy, this level's minus the other's; ``None`` if `same`."""
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

    @property
    def quality(self) -> Judged | None:
        """What decides whether quality is lost."""
        return self.accuracy or self.loss

    @property
    def cut(self) -> float | None:
        """`LevelRow.cut` of the two."""
        return self.row.cut or self.other.cut


def verdicts(report: Results) -> list[Verdict]:
    """Compare each row with O0 and with torch's own autocast, in the order of the rows."""
    table = rows(report)
    pairs = [(row, other) for row in table for other in _others(row, table)]
    among: dict[int, dict[Any, Runs]] = {id(other): {} for _, other in pairs}
    for row, other in pairs:
        if not _same(row, other):  # levels of the same losses are one comparison
            among[id(other)][row.arithmetic or id(row)] = _paired(row, other)
    bases = {id(other) for _, other in pairs if other.level == BASELINE}
    comparisons = max(1, sum(len(among[base]) for base in bases))
    return [
        _verdict(row, other, [*among[id(other)].values()], comparisons, table)
        for row, other in pairs
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
        found.setdefault(row.arithmetic, []).append(row)
    return [same for losses, same in found.items() if losses and len(same) > 1]


def _same(row: LevelRow, other: LevelRow) -> bool:
    return bool(row.finished) and row.arithmetic == other.arithmetic


def _same_as(row: LevelRow, other: LevelRow, among: Sequence[LevelRow]) -> str | None:
    """Name the first row that is compared with the same other and has the same losses."""
    before = among[: among.index(row)]
    alike = (one.label for one in before if _same(row, one) and other in _others(one, among))
    return next(alike, None)


# --- numbers -------------------------------------------------------------------------------------


Runs = list[tuple[Run, Run]]
"""Of each seed the run of a level and the other's."""


def _verdict(
    row: LevelRow,
    other: LevelRow,
    among: list[Runs],
    comparisons: int,
    table: Sequence[LevelRow],
) -> Verdict:
    pairs = _paired(row, other)
    logs = [log for mine, theirs in pairs if (log := paired_ratio(mine, theirs)) is not None]
    speed, noise = interval(logs), None
    if row.report.busy:
        speed, noise = None, row.report.busy
    elif row.stopped or other.stopped or any(len(run.blocks) < 2 for both in pairs for run in both):
        speed = None  # of a few steps, the first
    elif row.unsteady or other.unsteady or (speed and speed.high > NOISY * speed.low):
        speed, noise = None, UNEVEN
    margin, least_sd = _margin(row)
    same, has_loss = _same(row, other), bool(row.test_losses or not row.accuracies)

    def judged(values: Callable[[Runs], Pairs], margin: float, sd: float = 0.0) -> Judged | None:
        counts = {"comparisons": comparisons, "planned": len(row.cells)}
        found = judge(values(pairs), margin, among=[*map(values, among)], least_sd=sd, **counts)
        return None if same else found

    return Verdict(
        row=row,
        other=other,
        speed=speed,
        ratio=math.exp(statistics.fmean(logs)) if logs else None,
        seeds=len(logs),
        noise=noise,
        memory=row.peak_bytes / other.peak_bytes if row.peak_bytes and other.peak_bytes else None,
        accuracy=judged(_accuracies, margin, least_sd),
        loss=judged(_log_losses, math.log(1 + LOSS_MARGIN)) if has_loss else None,
        loss_of="test loss" if row.test_losses else "training loss",
        each_speed=tuple(logs),
        each_accuracy=_differences(_accuracies(pairs)),
        each_loss=_differences(_log_losses(pairs)),
        same=same,
        same_as=_same_as(row, other, table),
    )


def _accuracies(pairs: Runs) -> Pairs:
    runs = [both for both in pairs if _as_long(*both)]
    return [(m.accuracy[-1], t.accuracy[-1]) for m, t in runs if m.accuracy and t.accuracy]


def _log_losses(pairs: Runs) -> Pairs:
    return [(-_log_loss(m), -_log_loss(t)) for m, t in pairs if _as_long(m, t)]


def _differences(pairs: Pairs) -> tuple[float, ...]:
    return tuple(mine - theirs for mine, theirs in pairs)


def _as_long(mine: Run, theirs: Run) -> bool:
    """Whether both came to their end after as many steps, so that their quality is comparable."""
    return mine.finished and theirs.finished and len(mine.losses) == len(theirs.losses)


def _paired(row: LevelRow, other: LevelRow) -> Runs:
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
