"""Is a level worth it: comparisons over seeds, with intervals, and plain sentences for each.

Speed is compared by the logarithms of the median step times of runs with the same seed: a 95 %
interval of their mean, by Student's t below 20 pairs and by the bootstrap from there on
(`apex.bench.intervals`). Fewer than three pairs give no interval and no verdict.

"Faster by 20 %": 1.2 times as many steps in the same time; "slower by 20 %": a step takes 1.2 times
as long. One interval in twenty excludes the truth, so of many levels some differ by chance alone.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apex.bench.intervals import LEAST, Interval, inside, interval, mean_interval
from apex.bench.training.results import Report, Run
from apex.bench.training.rows import BASELINE, Row, baseline_of, rows, runs_of

__all__ = ["Interval", "Verdict", "interval", "percent", "verdicts"]

LAUNCH_BOUND = 0.9  # share of the step in which the host is still launching kernels
SAME_MEMORY = 0.005  # relative; less is not worth a word
TORCH_NAMES = {"fp16": "float16", "bf16": "bfloat16"}


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
    """Difference in points of accuracy, paired over seeds, with Student's t: above 0 is better."""
    inside: bool | None
    """Whether the mean accuracy lies where the mean of as many further runs of the other would:
    `apex.bench.intervals.inside`."""
    sentence: str
    """Faster or slower, memory, accuracy, and the reason where it is known. That of a quick report
    begins with "quick run: "."""


def verdicts(report: Report) -> list[Verdict]:
    """Compare each row with O0 and with torch's own autocast, in the order of the rows."""
    table = rows(report)
    return [_verdict(report, row, other) for row in table for other in _others(row, table)]


def percent(part: float) -> str:
    """Write a share of 1 with a decimal below 10 %."""
    return f"{100 * part:.{1 if abs(part) < 0.0995 else 0}f} %"


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


def _verdict(report: Report, row: Row, other: Row) -> Verdict:
    pairs = _pairs(runs_of(report, row), runs_of(report, other))
    times = [(_median(mine), _median(theirs)) for mine, theirs in pairs]
    speed = interval([math.log(theirs / mine) for mine, theirs in times])
    right = [(m.accuracy[-1], t.accuracy[-1]) for m, t in pairs if m.accuracy and t.accuracy]
    right = [pair for pair in right if all(map(math.isfinite, pair))]
    mine, theirs = [pair[0] for pair in right], [pair[1] for pair in right]
    band = inside(mine, theirs)
    difference = mean_interval([m - t for m, t in right])
    memory = row.peak_bytes / other.peak_bytes if row.peak_bytes and other.peak_bytes else None
    problems = [f"{r.label}: {r.problem}" for r in (row, other) if r.problem]
    said: list[str | None]
    if speed is None:
        said = [_no_verdict(row, other, len(pairs)), *problems]
    else:
        quality = _loss(row, other)
        if difference is not None:
            quality = _accuracy(mine, theirs, difference, band, other)
        seeds = f"{len(pairs)} seeds{' in one process' if report.quick else ''}"
        said = [_speed(row, other, speed, seeds), *_reasons(report, row, other, speed)]
        said += [_memory(memory), quality, *problems]
    text = " ".join(" ".join(f"{part.rstrip('.')}." for part in said if part).split())
    return Verdict(
        task=row.task,
        batch=row.batch,
        label=row.label,
        against=other.label,
        pairs=len(pairs),
        speed=speed,
        total=_total(pairs),
        memory=memory,
        accuracy=difference,
        inside=band,
        sentence=f"quick run: {text}" if report.quick else text,
    )


def _pairs(mine: Sequence[Run], theirs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pair the runs of the same seed that came to their end with times.

    A level of which every run diverged is not worth a time: no pairs.
    """
    if not all(any(run.status == "ok" for run in runs) for runs in (mine, theirs)):
        return []
    by_seed = {run.cell.seed: run for run in theirs if _timed(run)}
    return [(r, by_seed[r.cell.seed]) for r in mine if _timed(r) and r.cell.seed in by_seed]


def _timed(run: Run) -> bool:
    return run.finished and bool(run.counted_ms) and _median(run) > 0


def _median(run: Run) -> float:
    return statistics.median(run.counted_ms)


def _total(pairs: Sequence[tuple[Run, Run]]) -> float | None:
    mine, theirs = (sum(sum(pair[i].epoch_seconds) for pair in pairs) for i in (0, 1))
    return theirs / mine if mine and theirs else None


# --- sentences -----------------------------------------------------------------------------------


def _no_verdict(row: Row, other: Row, pairs: int) -> str:
    seeds = "1 seed was" if pairs == 1 else f"{pairs or 'no'} seeds were"
    return (
        f"{row.label} is not compared with {other.label}: {seeds} measured at both, and "
        f"{LEAST} are needed"
    )


def _speed(row: Row, other: Row, speed: Interval, seeds: str) -> str:
    if speed.low <= 1 <= speed.high:
        return (
            f"{row.label} against {other.label}: no difference in speed seen (between "
            f"{_either(speed.low)} and {_either(speed.high)}; 95 % interval of {seeds})"
        )
    found, word = (speed.value, speed.low, speed.high), "faster"
    if speed.value < 1:
        found, word = (1 / speed.value, 1 / speed.high, 1 / speed.low), "slower"
    if found[0] >= 2:
        value, low, high = map(_factor, found)
        value = f"a factor of {value}"
    else:
        value, low, high = (percent(ratio - 1) for ratio in found)
    interval = f"95 % interval of {seeds}: {low} to {high}"
    return f"{row.label} is {word} than {other.label} by {value} ({interval})"


def _either(ratio: float) -> str:
    word, ratio = ("faster", ratio) if ratio >= 1 else ("slower", 1 / ratio)
    by = f"a factor of {_factor(ratio)}" if ratio >= 2 else percent(ratio - 1)
    return f"{word} by {by}"


def _factor(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 1.95 else 1 if ratio < 9.95 else 0}f}"


def _reasons(report: Report, row: Row, other: Row, speed: Interval) -> list[str]:
    found = []
    if speed.high < 1 and other.level == BASELINE:
        why = _why_not_native(report.environment, row.dtype)
        found += [f"Slower than fp32 here: {why}"] if why else []
    if row.host_ms and row.ms_median and row.host_ms >= LAUNCH_BOUND * row.ms_median:
        compiled = all(run.cell.compile for run in runs_of(report, row))
        remedy = "try a larger batch" if compiled else "try a larger batch or torch.compile"
        found.append(f"{row.label} is launch-bound: {remedy}")
    if row.data_ms and row.ms_median and row.data_ms > row.ms_median:
        found.append(f"At {row.label} the loader takes longer than the step")
    return found


def _why_not_native(environment: dict[str, Any], dtype: str) -> str | None:
    """Say why the device does not compute a 16-bit type itself; ``None`` if it does, or may."""
    device = environment.get("device", {})
    for half in device.get("half_types", ()):
        if half["dtype"] == TORCH_NAMES.get(dtype) and half["native"] is False:
            if device.get("device") == "cpu":
                return f"this CPU has no {dtype} arithmetic"
            return f"{dtype} on this device {half['why']}"
    return None


def _memory(ratio: float | None) -> str | None:
    if ratio is None:
        return None
    if abs(ratio - 1) < SAME_MEMORY:
        return "It needs as much memory"
    if ratio >= 2:
        return f"It needs {ratio:.1f} times the memory"
    return f"It needs {percent(abs(ratio - 1))} {'more' if ratio > 1 else 'less'} memory"


def _accuracy(
    mine: Sequence[float],
    theirs: Sequence[float],
    difference: Interval,
    band: bool | None,
    other: Row,
) -> str:
    here, there = statistics.fmean(mine), statistics.fmean(theirs)
    if list(mine) == list(theirs):
        return f"Its accuracy, {here:.2f} %, is that of {other.label} at every seed"
    if band is None:
        return (
            f"Its accuracy is {here:.2f} %; every run of {other.label} had {there:.2f} %, "
            "which gives no band to compare with"
        )
    return (
        f"Its accuracy, {here:.2f} %, is {'inside' if band else 'outside'} the band of "
        f"{other.label}'s seeds ({there:.2f} %; difference {difference.value:+.2f} points, "
        f"95 % interval: {difference.low:+.2f} to {difference.high:+.2f})"
    )


def _loss(row: Row, other: Row) -> str | None:
    if row.loss is None or other.loss is None or row.accuracy is not None:
        return None
    return f"Its final loss is {row.loss.mean:.4g}, that of {other.label} {other.loss.mean:.4g}"
