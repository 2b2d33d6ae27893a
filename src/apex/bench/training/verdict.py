"""Is a level worth it: a level beside another, over seeds, in numbers and plain sentences.

*Speed.* Both levels took turns in one process, so a seed gives one ratio: the median over pairs of
rounds of the ratio of their median step times. The interval over the seeds is Student's t. Where
the machine was busy, or the interval spans a factor of two, there is no verdict.

*Quality.* The rule is `apex.bench.intervals.judge`: differences paired by seed, an interval that is
corrected for the number of levels, and a margin. It is applied to the accuracy, to the mean loss on
the test set, which is finer, and to the training loss where a task has neither.

"1.2 times the speed": 1.2 times as many steps in the same time.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apex.bench.intervals import LEAST, Interval, Judged, interval, judge
from apex.bench.training.results import Operator, Report, Run
from apex.bench.training.rows import BASELINE, Row, rows

__all__ = [
    "ALIKE",
    "BUSY",
    "LOSS_MARGIN",
    "Verdict",
    "alike",
    "as_long",
    "baseline_of",
    "beside",
    "paired",
    "paired_ratio",
    "same_arithmetic",
    "times",
    "verdicts",
]

LAUNCH_BOUND = 0.9  # share of the step in which the host is still launching kernels
SAME_MEMORY = 0.005  # relative; less is not worth a word
NOISY = 2.0  # upper over lower end of an interval that says nothing
LOSS_MARGIN = 0.05  # relative: how much larger a loss may be
LEAST_SAMPLES = 3  # of a test set, that a margin is never below
MOST_LOSS = 10_000  # times as high: more is said as "or more"
ALIKE = 1.1  # times the other's speed or less, and the reverse: "about as fast"
GREW = 0.05  # of O0's step: operators that grew by less are not named
TORCH_NAMES = {"fp16": "float16", "bf16": "bfloat16"}
BUSY = "too noisy: something else is using this machine"

# What to do about an operator that got slow: device type and dtype, and the operator.
REMEDIES = {
    ("cpu", "float16", "convolution_backward"): "oneDNN has no fast kernel for it; amp's levels "
    "compute it in float32",
    ("cpu", "float16", "addmm"): "this CPU has no float16 arithmetic; amp's levels use float32",
    ("cpu", "float16", "mm"): "this CPU has no float16 arithmetic; amp's levels use float32",
}
CASTS = ("copy_", "_to_copy", "to")


@dataclass(frozen=True)
class Verdict:
    """A level against another at the same task and batch size."""

    row: Row
    other: Row
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
    inference: Interval | None
    """As `speed`."""
    same: bool
    """Whether all losses are the same numbers: the same arithmetic."""
    twin: str | None
    """An earlier level against the same other, whose losses are the same numbers."""
    sentences: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """All that is said, in one paragraph."""
        return " ".join(self.sentences)


def verdicts(report: Report) -> list[Verdict]:
    """Compare each row with O0 and with torch's own autocast, in the order of the rows."""
    table = rows(report)
    pairs = [(row, other) for row in table for other in _others(row, table)]
    levels = sum(other.level == BASELINE for _, other in pairs)
    return [_verdict(row, other, max(1, levels), _twin(row, other, table)) for row, other in pairs]


def baseline_of(row: Row, among: Sequence[Row]) -> Row | None:
    """Find the row of O0, TF32 off where that is a choice, at the same task and batch size."""
    labels = (BASELINE, f"{BASELINE} TF32 off")
    same = (r for r in among if (r.task, r.batch) == (row.task, row.batch))
    return next((r for r in same if r.label in labels), None)


def _others(row: Row, among: Sequence[Row]) -> list[Row]:
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


def same_arithmetic(of: Sequence[Row]) -> list[list[Row]]:
    """Put the rows of a task and batch size together whose losses are the same numbers."""
    found: dict[Any, list[Row]] = {}
    for row in of:
        if row.finished:
            found.setdefault(_losses(row), []).append(row)
    return [same for same in found.values() if len(same) > 1]


def _twin(row: Row, other: Row, among: Sequence[Row]) -> str | None:
    """Name the first row that is compared with the same other and has the same losses."""
    for one in among:
        if one is row:
            return None
        if other in _others(one, among) and one.finished and _losses(one) == _losses(row):
            return one.label
    return None


def _losses(row: Row) -> Any:
    return tuple((run.cell.seed, run.losses) for run in row.finished)


# --- numbers -------------------------------------------------------------------------------------


def _verdict(row: Row, other: Row, comparisons: int, twin: str | None) -> Verdict:
    pairs = paired(row, other)
    logs = [ratio for mine, theirs in pairs if (ratio := paired_ratio(mine, theirs))]
    speed, noise = interval([log for log, _ in logs]), None
    if row.stopped or other.stopped or any(len(run.blocks) < 2 for both in pairs for run in both):
        speed = None  # of a few steps, the first
    elif row.unsteady or other.unsteady or (speed and speed.high > NOISY * speed.low):
        speed, noise = None, BUSY
    inference = interval([log for _, log in logs if log is not None])
    quality = [both for both in pairs if as_long(*both)]
    margin, least_sd = _margin(row)
    points = [(m.accuracy[-1], t.accuracy[-1]) for m, t in quality if m.accuracy and t.accuracy]
    counts = {"comparisons": comparisons, "planned": len(row.cells)}
    accuracy = judge([m - t for m, t in points], margin, least_sd=least_sd, **counts)
    loss_of = "test loss" if row.test_losses else "training loss"
    differences = [_log_loss(t) - _log_loss(m) for m, t in quality]
    loss = judge(differences, math.log(1 + LOSS_MARGIN), **counts)
    made = Verdict(
        row=row,
        other=other,
        speed=speed,
        ratio=math.exp(statistics.fmean(log for log, _ in logs)) if logs else None,
        seeds=len(logs),
        noise=noise,
        memory=row.peak_bytes / other.peak_bytes if row.peak_bytes and other.peak_bytes else None,
        accuracy=accuracy,
        loss=None if row.accuracies and not row.test_losses else loss,
        loss_of=loss_of,
        inference=None if noise else inference,
        same=bool(row.finished) and _losses(row) == _losses(other),
        twin=twin,
        sentences=(),
    )
    said = [f"{part.rstrip('.')}." for part in _sentences(made) if part]
    return Verdict(**{**vars(made), "sentences": tuple(" ".join(one.split()) for one in said)})


def as_long(mine: Run, theirs: Run) -> bool:
    """Whether both came to their end after as many steps, so that their quality is comparable."""
    return mine.finished and theirs.finished and len(mine.losses) == len(theirs.losses)


def paired(row: Row, other: Row) -> list[tuple[Run, Run]]:
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


def paired_ratio(mine: Run, theirs: Run) -> tuple[float, float | None] | None:
    """Give the logarithms of their time over mine: of a step, and of inference.

    Rounds come in pairs of opposite order; the median over the pairs counts. Trainings that were
    not in one process have no rounds in common: then it is the ratio of the medians.
    """
    if mine.status == "stopped" or theirs.status == "stopped":
        first, other = (_first_turn(run) for run in (mine, theirs))
        if not (first and other):
            return None
        return math.log(statistics.median(other) / statistics.median(first)), None
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
    both = zip(mine.inference_ms, theirs.inference_ms, strict=False)
    inference = [math.log(t / m) for m, t in both]
    return _over_pairs(rounds), statistics.median(inference) if inference else None


def _first_turn(run: Run) -> tuple[float, ...]:
    """All that a run has that was stopped; its first step made the optimizer's state."""
    return run.step_ms[1 : run.blocks[1] if len(run.blocks) > 1 else None]


def _over_pairs(rounds: Sequence[float]) -> float:
    pairs = [statistics.fmean(rounds[i : i + 2]) for i in range(0, len(rounds) - 1, 2)]
    return statistics.median(pairs or rounds)


def _log_loss(run: Run) -> float:
    """Give the logarithm of the loss that is compared, nan where it has none."""
    found = run.test_loss[-1] if run.test_loss else run.final_loss
    return math.log(found) if found and 0 < found < math.inf else math.nan


def _margin(row: Row) -> tuple[float, float]:
    """Give the margin in points, and the least standard deviation of a difference."""
    size = next((run.test_size for run in row.finished if run.test_size), None)
    sample = 100 / size if size else 0.0
    return max(row.report.margin, LEAST_SAMPLES * sample), sample / math.sqrt(2)


# --- sentences -----------------------------------------------------------------------------------


def _sentences(of: Verdict) -> list[str | None]:
    row, other = of.row, of.other
    said: list[str | None] = [_speed(of), *_reasons(of)]
    if row.problem and not row.stopped:
        said.append(f"{row.label}: {row.problem}")
    said.append(_memory(of.memory))
    if of.same:
        said.append(f"Its losses are those of {other.label} to the last bit: the same arithmetic")
    elif of.twin:
        said.append(f"Its losses are those of {of.twin} to the last bit: see there")
    elif row.finished:
        said += [_accuracy(of), _loss_said(of)]
    return said


def _speed(of: Verdict) -> str:
    name, other, seeds = of.row.label, of.other.label, of.seeds
    if of.row.stopped:
        stopped = sum(run.status == "stopped" for run in of.row.runs)
        where = (
            "" if stopped == len(of.row.runs) else f", at {stopped} of {len(of.row.runs)} seeds,"
        )
        return f"{name} was{where} {of.row.stopped.error}"
    if of.other.stopped and of.ratio:
        return f"{name}: about {times(of.ratio)} the speed of {other}, which was stopped"
    if of.noise:
        return f"{name} against {other}: no verdict on speed ({of.noise})"
    if of.ratio is None:
        return f"{name}: its speed is not compared with {other}'s"
    if of.speed is None:
        count = "1 seed" if seeds == 1 else f"{seeds} seeds"
        found = f"about {times(of.ratio)} the speed of {other}"
        if seeds >= LEAST:
            return f"{name}: {found} ({count}, their first steps alone: too few for an interval)"
        return f"{name}: {found} ({count}; {LEAST} are needed for an interval)"
    ends = f"95 %, {seeds} seeds: {_times(of.speed.low)} to {_times(of.speed.high)}"
    if of.speed.low <= 1 <= of.speed.high and not alike(of.speed):
        return f"{name} may be faster or slower than {other} ({ends} times the speed)"
    if of.speed.low <= 1 <= of.speed.high:
        return f"{name} is about as fast as {other} ({ends} times the speed)"
    if of.speed.value < 1:
        slower = [_times(1 / value) for value in (of.speed.value, of.speed.high, of.speed.low)]
        return (
            f"{name} is slower than {other}: a step takes {slower[0]} times as long (95 %, {seeds} "
            f"seeds: {slower[1]} to {slower[2]})"
        )
    return f"{name} has {times(of.speed.value)} the speed of {other} ({ends})"


def alike(speed: Interval) -> bool:
    """Whether a level is proved to be about as fast: an interval around 1 may be wide."""
    return speed.low >= 1 / ALIKE and speed.high <= ALIKE


def times(ratio: float | None) -> str:
    """Write a ratio for people."""
    return "" if ratio is None else f"{_times(ratio)} times"


def beside(of: Verdict) -> str:
    """Write the speed beside the other's, with its interval, in a few words."""
    if of.noise:
        return "too noisy to compare with"
    ends = f" ({_times(of.speed.low)} to {_times(of.speed.high)})" if of.speed else ""
    about = "" if of.speed else "about "
    return f"{about}{_times(of.ratio)}{ends} times" if of.ratio else "not compared with"


def _times(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 9.95 else 0}f}"


def _reasons(of: Verdict) -> list[str]:
    row, found = of.row, []
    ratio = of.speed.high if of.speed else of.ratio
    if of.other.level == BASELINE and ratio and ratio < 1 / (1 + GREW) and not of.noise:
        found += [_grown(of)] if row.operators else []
        why = _why_not_native(row.report.environment, row.dtype)
        found += [f"Reason: {why}"] if why else []
    if row.host_ms and row.ms and row.host_ms >= LAUNCH_BOUND * row.ms:
        compiled = all(cell.compile for cell in row.cells)
        remedy = "try a larger batch" if compiled else "try a larger batch or torch.compile"
        found.append(f"{row.label} is launch-bound: {remedy}")
    if row.data_ms and row.ms and row.data_ms > row.ms:
        found.append(f"At {row.label} the loader takes longer than the step")
    return found


def _grown(of: Verdict) -> str:
    """Name the three operators whose time grew most over the other's, with what to do."""
    mine, theirs = _by_name(of.row.operators), _by_name(of.other.operators)
    total = sum(one.ms for one in of.row.operators)
    base = sum(one.ms for one in of.other.operators)
    before = {name: one.ms for name, one in theirs.items()}
    grown = {name: one.ms - before.get(name, 0.0) for name, one in mine.items()}
    worst = [n for n in sorted(grown, key=lambda n: -grown[n])[:3] if grown[n] > GREW * base]
    device = of.row.report.environment["device"]["device"].partition(":")[0]
    said = []
    for name in worst:
        one = mine[name]
        how = f", {times(one.ms / before[name])} {of.other.label}'s" if before.get(name) else ""
        remedy = "casts between dtypes" if name in CASTS else None
        if of.row.level.startswith("native-"):
            remedy = REMEDIES.get((device, one.dtype, name), remedy)
        dtype = f" in {one.dtype}" if one.dtype else ""
        more = f" ({remedy})" if remedy else ""
        said.append(f"{name}{dtype} {100 * one.ms / total:.0f} % of the step{how}{more}")
    return f"What grew: {'; '.join(said)}" if said else ""


def _by_name(operators: Sequence[Operator]) -> dict[str, Operator]:
    """Add up the dtypes of an operator, under the one that takes most."""
    found: dict[str, Operator] = {}
    for one in operators:
        known = found.get(one.name, one)
        ms = one.ms if known is one else known.ms + one.ms
        found[one.name] = Operator(one.name, known.dtype, ms)
    return found


def _why_not_native(environment: dict[str, Any], dtype: str) -> str | None:
    """Say why the device does not compute a 16-bit type itself; ``None`` if it does, or may."""
    device = environment.get("device", {})
    for half in device.get("half_types", ()):
        if half["dtype"] == TORCH_NAMES.get(dtype) and half["native"] is False:
            if device.get("device") == "cpu":
                return f"this CPU has no {half['dtype']} arithmetic"
            return f"{half['dtype']} on this device {half['why']}"
    return None


def _memory(ratio: float | None) -> str | None:
    if ratio is None:
        return None
    if abs(ratio - 1) < SAME_MEMORY:
        return "It needs as much memory"
    return f"It needs {ratio:.2f} times the memory"


def _accuracy(of: Verdict) -> str | None:
    if of.accuracy is None:
        return None
    found = of.accuracy
    low, high, level = found.interval.low, found.interval.high, f"95 %, {found.seeds} seeds"
    if low >= 0 and high > 0:
        return f"Its accuracy is higher by {low:.2f} to {high:.2f} points ({level})"
    if high < 0:
        said = f"It loses between {-high:.2f} and {-low:.2f} points of accuracy ({level})"
        if not (found.fine or found.worse):
            said += f"; whether more than {found.margin:.2g}, {_cannot(found)}"
        return said
    if found.fine:
        return f"It loses at most {max(0.0, -low):.2f} points of accuracy ({level})"
    ends = f"between {low:+.2f} and {high:+.2f} points"
    return f"Accuracy: {_cannot(found)}: {ends}{_more(of, found)}"


def _loss_said(of: Verdict) -> str | None:
    if of.loss is None:
        return None
    found, name = of.loss, of.loss_of.capitalize()
    # Of the other over this one: a high end is a loss that fell.
    best, worst = (
        math.exp(min(-end, 99.0)) - 1 for end in (found.interval.high, found.interval.low)
    )
    level = f"95 %, {found.seeds} seeds"
    if best > 0:
        return f"{name} is higher by {_percent(best)} to {_percent(worst)} ({level})"
    if worst < 0:
        return f"{name} is lower by {_percent(-worst)} to {_percent(-best)} ({level})"
    if found.fine:
        return f"{name} is at most {_percent(worst)} higher ({level})"
    ends = f"between {_percent(best, '+')} and {_percent(worst, '+')}"
    return f"{name}: {_cannot(found)}: {ends}{_more(of, found)}"


def _percent(part: float, sign: str = "") -> str:
    if part >= MOST_LOSS:
        return f"a factor of {MOST_LOSS:,} or more"
    if abs(part) >= 2:
        return f"a factor of {1 + part:.3g}"
    spec = ".1g" if 0 < abs(part) < 0.0005 else ".1f" if abs(part) < 0.0995 else ".0f"
    return f"{100 * part:{sign}{spec}} %"


def _cannot(found: Judged) -> str:
    return f"{found.seeds} seeds cannot tell"


def _more(of: Verdict, found: Judged) -> str:
    """Name the number of seeds that would tell, and the time that they would take."""
    if found.needed is None:
        return ""
    report = of.row.report
    seeds = len({run.cell.seed for run in report.runs})
    more = found.needed / seeds / 60 if seeds else 0.0
    minutes, budget = report.seconds * more, math.ceil((report.budget_s or 0.0) * more)
    time = f", some {minutes:.0f} minutes" if minutes >= 1.5 else ""
    how = f"` with `--budget {budget}m`" if budget else f"`{time}"
    return f"; about {found.needed} would (`--seeds {found.needed}{how})"
