"""What verdicts say, in plain sentences. `answer` has the first one.

"1.2 times the speed": 1.2 times as many steps in the same time.
"""

import math
from collections.abc import Sequence
from typing import Any

from apex.bench.intervals import LEAST, Interval, Judged
from apex.bench.training.results import Operator
from apex.bench.training.rows import BASELINE
from apex.bench.training.verdict import Verdict

__all__ = ["ALIKE", "alike", "beside", "sentences", "times", "why_not_native"]

LAUNCH_BOUND = 0.9  # share of the step in which the host is still launching kernels
SAME_MEMORY = 0.005  # relative; less is not worth a word
MOST_LOSS = 10_000  # times as high: more is said as "or more"
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
        found.append(f"Its losses are those of {other.label} to the last bit: the same arithmetic")
    elif of.same_as:
        found.append(f"Its losses are those of {of.same_as} to the last bit: see there")
    elif row.finished:
        found += [_accuracy(of), _loss(of)]
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
            return f"{name}: {found} ({count}, their first steps alone: too few for an interval)"
        return f"{name}: {found} ({count}; {LEAST} are needed for an interval)"
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


def beside(of: Verdict) -> str:
    """Write the speed beside the other's, with its interval, in a few words."""
    if of.noise:
        return "too noisy to compare with"
    ends = f" ({times(of.speed.low)} to {times(of.speed.high)})" if of.speed else ""
    about = "" if of.speed else "about "
    return f"{about}{times(of.ratio)}{ends} times" if of.ratio else "not compared with"


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


def why_not_native(environment: dict[str, Any], dtype: str) -> str | None:
    """Say why the device does not compute a 16-bit type itself; ``None`` if it does, or may."""
    device = environment.get("device", {})
    for half in device.get("half_types", ()):
        if half["dtype"] == TORCH_NAMES.get(dtype) and half["native"] is False:
            if device.get("device") == "cpu":
                return f"this CPU has no {half['dtype']} arithmetic"
            return f"{half['dtype']} on this device {half['why']}"
    return None


def _accuracy(of: Verdict) -> str | None:
    if of.row.unlearnt:
        return f"Its accuracy is {of.row.unlearnt}"
    if of.accuracy is None:
        return None
    found = of.accuracy
    low, high, level = found.interval.low, found.interval.high, f"95 %, {found.seeds} seeds"
    if low >= 0 and high > 0:
        return f"Its accuracy is higher by {low:.2f} to {high:.2f} points ({level})"
    if high < 0:
        loses = f"It loses between {-high:.2f} and {-low:.2f} points of accuracy ({level})"
        if found.fine or found.worse:
            return loses
        return f"{loses}; whether more than {found.margin:.2g}, {_cannot(found)}"
    if found.fine:
        return f"It loses at most {max(0.0, -low):.2f} points of accuracy ({level})"
    ends = f"between {low:+.2f} and {high:+.2f} points"
    return f"Accuracy: {_cannot(found)}: {ends}{_more(of, found)}"


def _loss(of: Verdict) -> str | None:
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
