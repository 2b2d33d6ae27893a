"""The answer of a report, in one or two sentences that a person can act on.

Asked in this order: was anything compared; did other programs disturb it; is there a level that is
faster, or as fast with less memory, and has not lost accuracy; could a level be one that these
seeds or steps cannot tell; else float32. It says "Use" only if whole trainings proved the
quality of the level. Levels whose losses are the same numbers differ in speed alone: the fastest is
named, or all that are as fast, torch's own autocast among them.
"""

from collections.abc import Sequence

from apex.commands.bench.intervals import LEAST
from apex.commands.bench.training.results import Results
from apex.commands.bench.training.rows import BASELINE, mean
from apex.commands.bench.training.sentences import (
    ALIKE,
    SAME_MEMORY,
    TORCH_NAMES,
    alike,
    quality,
    times,
    why_not_native,
)
from apex.commands.bench.training.verdict import Verdict
from apex.commands.options import unique

__all__ = ["answers"]

WORTH = 1.05  # times the speed, at least, of a level to take
LESS = 0.9  # times the memory, at most


def answers(report: Results, of: Sequence[Verdict]) -> list[str]:
    """Answer for each task and batch size; several have their name before the answer."""
    places = dict.fromkeys((cell.task, cell.batch) for cell in report.plan)
    found = []
    for task, batch in places:
        here = [
            v
            for v in of
            if (v.row.task, v.row.batch) == (task, batch)
            and v.other.label.removesuffix(" TF32 off") == BASELINE
        ]
        before = f"{task}, batch {batch}: " if len(places) > 1 else ""
        found.append(before + _answer(report, here))
    return found


def _answer(report: Results, of: Sequence[Verdict]) -> str:
    if not of:
        return "No answer: apex needs results of O0 and of another level."
    if not any(run.status == "ok" for run in of[0].other.runs):
        return f"No answer, because {of[0].other.label} did not finish: {of[0].other.problem}."
    right = [v for v in of if _trained(v) and not _bad(v)]
    if report.busy:
        again = "Close them and run the same command again"
        return f"No advice: {report.busy}. {again}.{_meanwhile(report)}"
    if best := _best(right):
        return _advice(best, of)
    unknown: dict[str, list[str]] = {}
    for v in right:
        if why := _unknown(v):
            unknown.setdefault(why, []).append(v.row.label)
    if unknown:
        why, labels = next(iter(unknown.items()))
        where = "" if len(labels) == len(of) else f" on {', '.join(labels)}"
        return f"No answer{where}: {why}."
    return _stay(of, right)


def _meanwhile(report: Results) -> str:
    """Name the level to start with, by the 16-bit types that the device computes (levels.md)."""
    halves = report.environment.get("device", {}).get("half_types", ())
    native = {half["dtype"]: half["native"] for half in halves}
    if native.get("bfloat16"):
        return " Until then start with O4: this device has fast bfloat16."
    if native.get("bfloat16") is False and native.get("float16"):
        return " Until then start with O1: this device has fast float16, and no bfloat16."
    if native.get("bfloat16") is False and native.get("float16") is False:
        return " Until then stay with O0: this device has no fast 16-bit type."
    return ""


def _trained(of: Verdict) -> bool:
    """Whether it did at each seed: a level that diverges at one of five is no advice."""
    return bool(of.row.runs) and all(run.status == "ok" for run in of.row.runs)


def _bad(of: Verdict) -> bool:
    return any(judged is not None and judged.worse for judged in (of.accuracy, of.loss))


# --- a level -------------------------------------------------------------------------------------


def _best(right: Sequence[Verdict]) -> list[Verdict]:
    """Find the best level and those that compute the same as fast, in the order of the rows."""
    faster = [v for v in right if v.speed and v.speed.low > 1 and v.speed.value >= WORTH]
    smaller = [v for v in right if v.memory and v.memory <= LESS and v.speed and not _slower(v)]
    best = faster or smaller
    order = sorted(best, key=lambda v: -v.ratio if faster and v.ratio else v.memory or 1.0)
    top = next(filter(_proved, order), order[0] if order else None)
    return [v for v in best if top and (v is top or _as_good(v, top))]


def _as_good(of: Verdict, top: Verdict) -> bool:
    """Whether it computes the same, and the intervals of the speeds overlap."""
    mine, best = of.speed, top.speed
    overlap = mine and best and mine.high >= best.low and best.high >= mine.low
    return bool(overlap) and of.row.arithmetic == top.row.arithmetic


def _proved(of: Verdict) -> bool:
    """Whether whole trainings have shown that no quality is lost."""
    fine = of.same or (of.quality is not None and of.quality.fine)
    return fine and not (of.cut or of.other.unlearnt or of.row.unlearnt)


def _advice(best: Sequence[Verdict], among: Sequence[Verdict]) -> str:
    of = best[0]
    speeds = [v.speed for v in best if v.speed]
    if any(speed.low <= 1 for speed in speeds):
        ends = f"{min(s.low for s in speeds):.2f} to {max(s.high for s in speeds):.2f} times as"
        speed = f"{'about as' if all(map(alike, speeds)) else ends} fast"
    else:
        speed = f"{_range([speed.value for speed in speeds])} times as fast"
    memory = _range([v.memory for v in best if v.memory])
    used = "" if not of.memory or abs(of.memory - 1) < SAME_MEMORY else (
        f" and needs {memory} of the memory" if of.memory < 1 else
        f" and needs {memory} times the memory"
    )  # fmt: skip
    said = f"trains {speed} on this machine{_beside(best, among)}{used}. {_quality(of)}"
    return f"Use {_names(best)}: it {said}" if _proved(of) else f"{_names(best)} {said}"


def _names(of: Sequence[Verdict]) -> str:
    labels = [_name(v) for v in of]
    several = " or ".join(filter(None, [", ".join(labels[:-1]), labels[-1]]))
    return f"{TORCH_NAMES.get(of[0].row.dtype, 'TF32')} ({several})"


def _name(of: Verdict) -> str:
    return "torch's own autocast" if of.row.level.startswith("native-") else of.row.label


def _range(values: Sequence[float]) -> str:
    return " to ".join(unique(f"{end:.2f}" for end in (min(values), max(values)))) if values else ""


def _beside(best: Sequence[Verdict], among: Sequence[Verdict]) -> str:
    """Write the speed of what computes the same, of torch's autocast and of TF32 alone."""
    row = best[0].row
    labels = {f"native-{row.dtype}{row.label.removeprefix(row.level)}", f"{BASELINE} TF32 on"}
    found = []
    for v in among:
        if v not in best and (v.row.arithmetic == row.arithmetic or v.row.label in labels):
            name = "TF32 alone" if v.row.level == BASELINE else _name(v)
            found.append(f"{name}: {times(v.ratio) if v.ratio and not v.noise else 'no verdict'}")
    return f" ({'; '.join(found)})" if found else ""


def _quality(of: Verdict) -> str:
    """Say what was measured of its quality, and what would decide; no margin is named."""
    if of.cut:
        return (
            f"The time budget cut the trainings to {of.cut:.0f} % of their steps, too few to judge "
            "quality: run again with a larger `--budget`."
        )
    for row in (of.other, of.row):
        if row.unlearnt:
            return f"But {row.label}'s accuracy is {row.unlearnt}."
    if of.same:
        return f"Its losses equal {of.other.label}'s to the last bit."
    if of.quality is None:
        return "Its quality could not be compared."
    name, _, difference = quality(of)[0].partition(":")
    losses = [row.test_losses or row.final_losses for row in (of.row, of.other)]
    values = [of.row.accuracies, of.other.accuracies] if of.accuracy else losses
    mine, theirs = (f"{mean(each):.{3 if of.accuracy else 2}g}" for each in values)
    unit = " %" if of.accuracy else ""
    both = f"{mine}{unit} ({of.other.label}: {theirs}{unit})"
    return f"{name.capitalize()} is {both},{difference}."


# --- why there is no answer ----------------------------------------------------------------------


def _unknown(of: Verdict) -> str | None:
    """Say what keeps a level that trained well from being told fast, slow, small or large."""
    if of.noise:
        return of.noise
    if of.speed is None:
        return None if _slower(of) else _why_no_interval(of)
    if of.speed.low <= 1 and (of.speed.value >= WORTH or of.speed.high > ALIKE):
        ends = f"{times(of.speed.low)} to {times(of.speed.high)} times as fast"
        return f"{of.seeds} seeds cannot tell whether it is faster ({ends})"
    return "its memory was not measured" if of.memory is None and not _slower(of) else None


def _why_no_interval(of: Verdict) -> str:
    """Say why a speed without noise has no interval: of the causes the first that is so."""
    report, planned = of.row.report, len(of.row.cells)
    steps = max((len(run.step_ms) for run in (*of.row.timed, *of.other.timed)), default=0)
    counts = f"{of.seeds} of {planned} seeds"
    if of.seeds >= LEAST or (of.cut and not of.seeds):
        who = "the time budget cut the trainings to" if of.cut else "the trainings have"
        return f"{who} {steps} steps, too few to compare"
    if report.left_out:
        return f"the time budget left no time for more than {counts[0]} of the seeds"
    if len({run.cell for run in of.row.runs}) < planned:
        return f"the run was interrupted after {counts}, and a comparison needs {LEAST}"
    if planned >= LEAST:
        why = "the time budget cut the others" if of.cut else "the others are too short"
        if of.other.problem:
            why = f"{of.other.label}: {of.other.problem}"
        return f"only {counts} can be compared ({why})"
    few = "1 seed is" if planned == 1 else f"{planned} seeds are"
    return f"{few} too few to compare (`--seeds {LEAST}`)"


# --- no level is worth it ------------------------------------------------------------------------


def _stay(of: Sequence[Verdict], right: Sequence[Verdict]) -> str:
    """Say that nothing is worth it: why no level is faster, and what ails those that are."""
    faults: dict[str, list[str]] = {}
    for v in of:
        if v not in right and not v.row.stopped:
            faults.setdefault(_fault(v), []).append(v.row.label)
    said = [f"{', '.join(labels)} {fault}" for fault, labels in faults.items()]
    slow = [v for v in of if v in right or v.row.stopped]
    dtypes, environment = unique(v.row.dtype for v in slow), of[0].row.report.environment
    why = why_not_native(environment, *dtypes)
    timed = [(v.ratio, v.row.label) for v in slow if v.ratio]
    known = why and all(why_not_native(environment, dtype) for dtype in dtypes)
    reasons = [why] if why and known else []
    if timed:
        ratio, label = max(timed)
        reasons.append(f"even the fastest, {label}, trains {times(ratio)} times as fast")
    head = f"no level is faster{', because ' if reasons else ''}{', and '.join(reasons)}"
    if faster := any(v.ratio and v.ratio > 1 for v in of if v not in slow):
        head = "no faster level trains as well"
    if why and (faster or not known):
        said.append(f"{why[0].upper()}{why[1:]}")
    return f"Stay with float32: {'. '.join([head, *said])}."


def _fault(of: Verdict) -> str:
    if not _trained(of):
        return "did not train to the end with every seed"
    lost = of.accuracy and of.accuracy.worse
    return "lost accuracy" if lost else f"had a higher {of.loss_of}"


def _slower(of: Verdict) -> bool:
    """Whether it took longer. Of too few seeds for an interval the ratio alone says so."""
    if of.noise:
        return False
    ratio = of.speed.value if of.speed else of.ratio
    return ratio is not None and ratio < 1 / WORTH
