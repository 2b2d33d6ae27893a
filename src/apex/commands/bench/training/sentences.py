"""What verdicts say, in plain sentences. `answer` has the first one.

"1.2 times the speed": 1.2 times as many steps in the same time.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from apex.commands.bench.intervals import LEAST, Interval, Judged
from apex.commands.bench.training.results import Operator
from apex.commands.bench.training.rows import BASELINE
from apex.commands.bench.training.verdict import Verdict

__all__ = ["ALIKE", "SAME_MEMORY", "TASK", "TORCH_NAMES", "alike", "quality", "sentences", "times"]
__all__ += ["why_not_native"]

LAUNCH_BOUND = 0.9  # share of the step in which the host is still launching kernels
SAME_MEMORY = 0.005  # relative; less is not worth a word
MOST_LOSS = 10_000  # times as high: more is said as "or more"
WIDE = 20  # margins: a wider interval says nothing
TASK, SEEDS = "digits-cnn", 10  # where nothing else is said; and for what a quick run leaves open
ALIKE = 1.1  # times the other's speed or less, and the reverse: "about as fast"
GREW = 0.05  # of O0's step: operators that grew by less are not named
TORCH_NAMES = {"fp16": "float16", "bf16": "bfloat16"}
# What to do about an operator that got slow: device type and dtype, and the operator.
REMEDIES = {
    ("cpu", "float16", "convolution_backward"): "oneDNN has no fast kernel for it; amp's levels "
    "compute it in float32",
    ("cpu", "float16", "addmm"): "this CPU has no float16 arithmetic; amp's levels use float32",
    ("cpu", "float16", "mm"): "this CPU has no float16 arithmetic; amp's levels use float32",
}
CASTS = ("copy_", "_to_copy", "to")


def sentences(of: Verdict) -> tuple[str, ...]:
    """Say what a level is beside the other: speed, reasons, memory, quality."""
    return tuple(" ".join(f"{part.rstrip('.')}.".split()) for part in _parts(of) if part)


def _parts(of: Verdict) -> list[str | None]:
    row, other = of.row, of.other
    found: list[str | None] = [_speed(of), *_reasons(of)]
    if row.problem and not row.stopped:
        found.append(f"{row.label}: {row.problem}")
    if of.memory is not None:
        same = abs(of.memory - 1) < SAME_MEMORY
        how = "as much memory" if same else f"{of.memory:.2f} times the memory"
        found.append(f"It needs {how}")
    if of.same:
        found.append(
            f"Its losses equal {other.label}'s to the last bit, so its arithmetic is the same"
        )
    elif of.same_as:
        found.append(f"Its losses equal {of.same_as}'s to the last bit; see {of.same_as}")
    elif row.finished:
        found += [f"{said[0].upper()}{said[1:]}" for said in quality(of)]
    return found


def _speed(of: Verdict) -> str:
    name, other, seeds = of.row.label, of.other.label, of.seeds
    if of.row.stopped:
        stopped = sum(run.status == "stopped" for run in of.row.runs)
        where = (
            "" if stopped == len(of.row.runs) else f", at {stopped} of {len(of.row.runs)} seeds,"
        )
        return f"{name} was{where} {of.row.stopped.error}"
    if of.other.stopped and of.ratio:
        return f"{name}: about {times(of.ratio)} times the speed of {other}, which was stopped"
    if of.noise:
        return f"{name} against {other}: no verdict on speed ({of.noise})"
    if of.ratio is None:
        return f"{name}: its speed is not compared with {other}'s"
    if of.speed is None:
        count = "1 seed" if seeds == 1 else f"{seeds} seeds"
        found = f"about {times(of.ratio)} times the speed of {other}"
        if seeds >= LEAST:
            return f"{name}: {found} ({count}, first steps only, too few for an interval)"
        return f"{name}: {found} ({count}; an interval needs {LEAST})"
    ends = f"95 %, {seeds} seeds: {times(of.speed.low)} to {times(of.speed.high)}"
    if of.speed.low <= 1 <= of.speed.high and not alike(of.speed):
        return f"{name} may be faster or slower than {other} ({ends} times the speed)"
    if of.speed.low <= 1 <= of.speed.high:
        return f"{name} is about as fast as {other} ({ends} times the speed)"
    if of.speed.value < 1:
        slower = [times(1 / value) for value in (of.speed.value, of.speed.high, of.speed.low)]
        return (
            f"{name} is slower than {other}: a step takes {slower[0]} times as long (95 %, {seeds} "
            f"seeds: {slower[1]} to {slower[2]})"
        )
    return f"{name} has {times(of.speed.value)} times the speed of {other} ({ends})"


def alike(speed: Interval) -> bool:
    """Whether a level is proved to be about as fast: an interval around 1 may be wide."""
    return speed.low >= 1 / ALIKE and speed.high <= ALIKE


def times(ratio: float) -> str:
    """Write a ratio with the digits that matter."""
    return f"{ratio:.{2 if ratio < 9.95 else 0}f}"


def _reasons(of: Verdict) -> list[str]:
    row, found = of.row, []
    ratio = of.speed.high if of.speed else of.ratio
    if of.other.level == BASELINE and ratio and ratio < 1 / (1 + GREW) and not of.noise:
        found += [_grown(of)] if row.operators else []
        why = why_not_native(row.report.environment, row.dtype)
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
    each = []
    for name in worst:
        one = mine[name]
        how = (
            f", {times(one.ms / before[name])} times {of.other.label}'s" if before.get(name) else ""
        )
        remedy = "casts between dtypes" if name in CASTS else None
        if of.row.level.startswith("native-"):
            remedy = REMEDIES.get((device, one.dtype, name), remedy)
        dtype = f" in {one.dtype}" if one.dtype else ""
        more = f" ({remedy})" if remedy else ""
        each.append(f"{name}{dtype} {100 * one.ms / total:.0f} % of the step{how}{more}")
    return f"What grew: {'; '.join(each)}" if each else ""


def _by_name(operators: Sequence[Operator]) -> dict[str, Operator]:
    """Add up the dtypes of an operator, under the one that takes most."""
    found: dict[str, Operator] = {}
    for one in operators:
        known = found.get(one.name, one)
        ms = one.ms if known is one else known.ms + one.ms
        found[one.name] = Operator(one.name, known.dtype, ms)
    return found


def why_not_native(environment: dict[str, Any], *dtypes: str) -> str | None:
    """Say which 16-bit types the device does not compute; ``None`` if it does all, or may."""
    device, names = environment.get("device", {}), [TORCH_NAMES.get(dtype) for dtype in dtypes]
    lacking = [
        half
        for half in device.get("half_types", ())
        if half["dtype"] in names and half["native"] is False
    ]
    if not lacking:
        return None
    if device.get("device") == "cpu":
        return f"this CPU has no {' and no '.join(half['dtype'] for half in lacking)} arithmetic"
    return " and ".join(f"{half['dtype']} on this device {half['why']}" for half in lacking)


def quality(of: Verdict) -> list[str]:
    """Say how accuracy and loss differ from the other's, each in a part of a sentence."""
    found = []
    if of.row.unlearnt:
        found.append(f"accuracy is {of.row.unlearnt}")
    elif of.accuracy:
        points = _difference(of, of.accuracy, lambda x: f"{abs(x):.2f} points", "higher", "lower")
        found.append(f"accuracy: {points}")
    if of.loss:
        share = _difference(
            of, of.loss, lambda x: _percent(abs(math.expm1(min(-x, 99.0)))), "lower", "higher"
        )
        found.append(f"{of.loss_of}: {share}")
    return found


def _difference(
    of: Verdict, found: Judged, size: Callable[[float], str], better: str, worse: str
) -> str:
    low, high = found.interval.low, found.interval.high
    seeds = f"(95 %, {found.seeds} seeds)"
    if low >= 0 and high > 0:
        return f"{better} by {size(low)} to {size(high)} {seeds}"
    if high < 0:
        more = "" if found.fine or found.worse else _more(of, found)
        return f"{worse} by {size(high)} to {size(low)} {seeds}{more}"
    if found.fine:
        return f"{worse} by {size(min(0.0, low))} at most {seeds}"
    ends = f"between {size(low)} {worse} and {size(high)} {better}"
    wide = high - low > WIDE * found.margin
    return f"{'not known' if wide else ends} {seeds}{_more(of, found)}"


def _percent(part: float) -> str:
    if part >= MOST_LOSS:
        return f"a factor of {MOST_LOSS:,} or more"
    if part >= 2:
        return f"a factor of {1 + part:.3g}"
    spec = ".1g" if 0 < part < 0.0005 else ".1f" if part < 0.0995 else ".0f"
    return f"{100 * part:{spec}} %"


def _more(of: Verdict, found: Judged) -> str:
    """Name the number of seeds that would tell, and the time that they would take."""
    if of.row.report.quick:
        task = "" if of.row.task == TASK else f" --task {of.row.task}"
        return (
            f". To decide, run `apex bench{task} --seeds {SEEDS}`, which trains on all of the data"
        )
    if found.needed is None:
        return ""
    report = of.row.report
    seeds = len({run.cell.seed for run in report.runs})
    more = found.needed / seeds / 60 if seeds else 0.0
    minutes, budget = report.seconds * more, math.ceil((report.budget_s or 0.0) * more)
    time = f", about {minutes:.0f} minutes" if minutes >= 1.5 else ""
    how = f"` with `--budget {budget}m`" if budget else f"`{time}"
    return f"; about {found.needed} seeds would decide (`--seeds {found.needed}{how})"
