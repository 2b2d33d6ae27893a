"""The first line of a report: which level to take, in one sentence."""

from collections.abc import Sequence

from apex.bench.intervals import LEAST
from apex.bench.training.results import Report
from apex.bench.training.rows import BASELINE
from apex.bench.training.sentences import ALIKE, alike, times
from apex.bench.training.verdict import Verdict

__all__ = ["answers"]

WORTH = 1.05  # times the speed, at least
LESS = 0.9  # times the memory, at most


def answers(report: Report, of: Sequence[Verdict]) -> list[str]:
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
        proved = [v for v in best if v.same or _fine(v)]
        return _take((proved or best)[0], proved=bool(proved))
    unknown = {v.row.label: why for v in right if (why := _unknown(v))}
    found = unknown or {v.row.label: _why_not(v) for v in of}
    reasons: dict[str, list[str]] = {}
    for label, why in found.items():
        reasons.setdefault(why, []).append(label)
    if unknown:
        why, labels = next(iter(reasons.items()))
        return f"No answer{'' if len(labels) == len(of) else ' on ' + ', '.join(labels)}: {why}."
    each = "; ".join(f"{', '.join(labels)} {why}" for why, labels in reasons.items())
    return f"None is worth it here, because {each}."


def _unknown(of: Verdict) -> str | None:
    """Say what keeps a level that trained well from being told fast, slow, small or large."""
    if of.speed is None:
        few = "seeds" if of.seeds < LEAST else "steps"
        return of.noise or f"too few {few} to compare"
    if of.speed.low <= 1 and (of.speed.value >= WORTH or of.speed.high > ALIKE):
        return f"{of.seeds} seeds cannot tell whether it is faster"
    return "its memory was not measured" if of.memory is None and not _slower(of) else None


def _why_not(of: Verdict) -> str:
    if of.row.stopped:
        return "took too long for the budget"
    if not _trained(of):
        return "did not train to the end at each seed"
    if _bad(of):
        return (
            "lost accuracy" if of.accuracy and of.accuracy.worse else f"had a higher {of.loss_of}"
        )
    if _slower(of):
        return "took longer"
    return f"stayed below {WORTH} times the speed and above {LESS} times the memory"


def _take(of: Verdict, *, proved: bool) -> str:
    parts, speed = [], of.speed
    if speed and speed.low > 1:
        parts.append(f"{times(speed.value)} the speed")
    elif speed:
        ends = f"{speed.low:.2f} to {speed.high:.2f} times the speed"
        parts.append("about as fast as O0" if alike(speed) else ends)
    if of.memory and of.memory <= LESS:
        parts.append(f"{of.memory:.2f} times the memory")
    quality = of.accuracy or of.loss
    within = f"within {of.accuracy.margin:.2g} points" if of.accuracy else "within 5 %"
    what = "accuracy" if of.accuracy else of.loss_of
    has = f"{of.row.label}: {', '.join(parts)}"
    if of.same:
        return f"Take {has}, the same losses as {of.other.label}."
    if proved:
        return f"Take {has}, {what} {within}."
    if quality is None:
        return f"Perhaps {has}. But its quality could not be compared."
    more = f"; about {quality.needed} would" if quality.needed else ""
    unknown = f"{quality.seeds} seeds cannot tell whether its {what} is {within}"
    return f"Perhaps {has}. But {unknown}{more}."


def _trained(of: Verdict) -> bool:
    """Whether it did at each seed: a level that diverges at one of five is no advice."""
    return bool(of.row.runs) and all(run.status == "ok" for run in of.row.runs)


def _fine(of: Verdict) -> bool:
    quality = of.accuracy or of.loss
    return quality is not None and quality.fine


def _bad(of: Verdict) -> bool:
    return any(judged is not None and judged.worse for judged in (of.accuracy, of.loss))


def _slower(of: Verdict) -> bool:
    return of.speed is not None and of.speed.value < 1 / WORTH
