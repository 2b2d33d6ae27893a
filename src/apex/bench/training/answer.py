"""The answer of a report: which level to take, or to stay with float32, or why nobody can tell.

A level is taken if it is faster, or as fast with less memory, and has not lost accuracy. Torch's
own autocast and TF32 stand beside it. "No answer" names its true reason: a busy machine, a time
budget that cut, an interruption, or too few seeds.
"""

from collections.abc import Sequence

from apex.bench.intervals import LEAST
from apex.bench.training.results import Results
from apex.bench.training.rows import BASELINE
from apex.bench.training.sentences import ALIKE, alike, times, why_not_native
from apex.bench.training.verdict import Verdict

__all__ = ["answers"]

WORTH = 1.05  # times the speed, at least, of a level to take
LESS = 0.9  # times the memory, at most
SLOWER = "took longer"
TOO_LONG = "took too long for the budget"


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
        found.append(before + _answer(here))
    return found


def _answer(of: Sequence[Verdict]) -> str:
    if not of:
        return "No answer: O0 and another level are needed."
    if not any(run.status == "ok" for run in of[0].other.runs):
        return f"No answer: {of[0].other.label}: {of[0].other.problem}."
    right = [v for v in of if _trained(v) and not _bad(v)]
    faster = [v for v in right if v.speed and v.speed.low > 1 and v.speed.value >= WORTH]
    smaller = [v for v in right if v.memory and v.memory <= LESS and v.speed and not _slower(v)]
    best = sorted(faster, key=lambda v: -v.speed.value if v.speed else 0.0)
    best = best or sorted(smaller, key=lambda v: v.memory or 1.0)
    if best:
        proved = [v for v in best if v.same or ((judged := v.accuracy or v.loss) and judged.fine)]
        return _take((proved or best)[0], of, proved=bool(proved))
    unknown: dict[str, list[str]] = {}
    for v in right:
        if why := _unknown(v):
            unknown.setdefault(why, []).append(v.row.label)
    if unknown:
        why, labels = next(iter(unknown.items()))
        return f"No answer{'' if len(labels) == len(of) else ' on ' + ', '.join(labels)}: {why}."
    return _stay(of)


# --- why there is no answer ----------------------------------------------------------------------


def _unknown(of: Verdict) -> str | None:
    """Say what keeps a level that trained well from being told fast, slow, small or large."""
    if of.noise:
        return of.noise
    busy = f"; {of.row.report.busy}" if of.row.report.busy else ""
    if of.speed is None:
        return None if _slower(of) else _why_no_interval(of) + busy
    if of.speed.low <= 1 and (of.speed.value >= WORTH or of.speed.high > ALIKE):
        return f"{of.seeds} seeds cannot tell whether it is faster{busy}"
    return "its memory was not measured" if of.memory is None and not _slower(of) else None


def _why_no_interval(of: Verdict) -> str:
    """Say why a speed without noise has no interval: of the causes the first that is so."""
    report, planned = of.row.report, len(of.row.cells)
    steps = max((len(run.step_ms) for run in (*of.row.timed, *of.other.timed)), default=0)
    cut = of.row.cut or of.other.cut
    counts = f"{of.seeds} of {planned} seeds"
    if of.seeds >= LEAST or (cut and not of.seeds):
        who = "the time budget cut the trainings to" if cut else "the trainings have"
        return f"{who} {steps} steps, too few to compare"
    if report.left_out:
        return f"the time budget left no time for more than {counts[0]} of the seeds"
    if len({run.cell for run in of.row.runs}) < planned:
        return f"interrupted after {counts}, and {LEAST} are needed to compare"
    if planned >= LEAST:
        why = "the time budget cut the others" if cut else "the others are too short"
        if of.other.problem:
            why = f"{of.other.label}: {of.other.problem}"
        return f"only {counts} can be compared ({why})"
    few = "1 seed is" if planned == 1 else f"{planned} seeds are"
    return f"{few} too few to compare (`--seeds {LEAST}`)"


# --- no level is worth it ------------------------------------------------------------------------


def _stay(of: Sequence[Verdict]) -> str:
    """Say that nothing is worth it, what each level did, and the known reason of slow ones."""
    found: dict[str, list[str]] = {}
    for v in of:
        found.setdefault(_why_not(v), []).append(v.row.label)
    each = "; ".join(f"{', '.join(labels)} {why}" for why, labels in found.items())
    trained = all(_trained(v) or v.row.stopped for v in of)
    nothing = trained and not any(_faster(v) for v in of)
    return f"Stay with float32 here: {'no level was faster. ' if nothing else ''}{each}."


def _faster(of: Verdict) -> bool:
    return of.speed.low > 1 if of.speed else bool(of.ratio and of.ratio > 1)


def _why_not(of: Verdict) -> str:
    if of.row.stopped or (_trained(of) and _slower(of)):
        why = why_not_native(of.row.report.environment, of.row.dtype)
        return (TOO_LONG if of.row.stopped else SLOWER) + (f" ({why})" if why else "")
    if not _trained(of):
        return "did not train to the end at each seed"
    if _bad(of):
        return (
            "lost accuracy" if of.accuracy and of.accuracy.worse else f"had a higher {of.loss_of}"
        )
    return f"stayed below {WORTH} times the speed and above {LESS} times the memory"


# --- a level to take -----------------------------------------------------------------------------


def _take(of: Verdict, among: Sequence[Verdict], *, proved: bool) -> str:
    parts, speed = [], of.speed
    beside = _others(of, among)
    if speed and speed.low > 1:
        parts.append(f"{times(speed.value)} times the speed{beside}")
    elif speed:
        ends = f"{speed.low:.2f} to {speed.high:.2f} times the speed"
        parts.append(f"{'about as fast as O0' if alike(speed) else ends}{beside}")
    if of.memory and of.memory <= LESS:
        parts.append(f"{of.memory:.2f} times the memory")
    quality = of.accuracy or of.loss
    within = f"within {of.accuracy.margin:.2g} points" if of.accuracy else "within 5 %"
    what = "accuracy" if of.accuracy else of.loss_of
    has = f"{of.row.label}: {', '.join(parts)}"
    if of.other.unlearnt:
        return f"Perhaps {has}. But {of.other.label}'s accuracy is {of.other.unlearnt}."
    if of.same:
        return f"Take {has}, the same losses as {of.other.label}."
    if proved:
        return f"Take {has}, {what} {within}."
    if quality is None:
        return f"Perhaps {has}. But its quality could not be compared."
    more = f"; about {quality.needed} would" if quality.needed else ""
    unknown = f"{quality.seeds} seeds cannot tell whether its {what} is {within}"
    return f"Perhaps {has}. But {unknown}{more}."


def _others(of: Verdict, among: Sequence[Verdict]) -> str:
    """Write what torch's autocast in the same dtype has, and TF32 alone, if they were trained."""
    row = of.row
    labels = {f"native-{row.dtype}{row.label.removeprefix(row.level)}": "torch's autocast"}
    labels |= {f"{BASELINE} TF32 on": "TF32 alone"}
    found = []
    for v in among:
        if v is not of and v.row.label in labels:
            value = times(v.ratio) if v.ratio and not v.noise else "no verdict"
            found.append(f"{labels[v.row.label]}: {value}")
    return f" ({'; '.join(found)})" if found else ""


def _trained(of: Verdict) -> bool:
    """Whether it did at each seed: a level that diverges at one of five is no advice."""
    return bool(of.row.runs) and all(run.status == "ok" for run in of.row.runs)


def _bad(of: Verdict) -> bool:
    return any(judged is not None and judged.worse for judged in (of.accuracy, of.loss))


def _slower(of: Verdict) -> bool:
    """Whether it took longer. Of too few seeds for an interval the ratio alone says so."""
    if of.noise:
        return False
    ratio = of.speed.value if of.speed else of.ratio
    return ratio is not None and ratio < 1 / WORTH
