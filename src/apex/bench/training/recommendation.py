"""The first line of a report: which level to take, in one sentence."""

from collections.abc import Sequence

from apex.bench.training.results import Report
from apex.bench.training.rows import BASELINE
from apex.bench.training.verdict import Verdict, times

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
    if all(verdict.noise for verdict in of if not verdict.row.stopped):
        return f"No answer: {of[0].noise or 'nothing was measured'}."
    trained = [v for v in of if any(run.status == "ok" for run in v.row.finished)]
    if not trained:
        return "None is worth it here, because none trained to its end."
    right = [v for v in trained if not _bad(v)]
    if not right:
        return "None is worth it here, because all lose accuracy."
    faster = [v for v in right if v.speed and v.speed.low > 1 and v.speed.value >= WORTH]
    smaller = [v for v in right if v.memory and v.memory <= LESS and not _slower(v)]
    best = sorted(faster, key=lambda v: -v.speed.value if v.speed else 0.0)
    if not best:
        best = sorted(smaller, key=lambda v: v.memory or 1.0)
    if not best:
        known = any(v.speed for v in right)
        why = "none is faster, and none needs less memory" if known else "too few seeds to compare"
        return f"None is worth it here, because {why}." if known else f"No answer: {why}."
    proved = [v for v in best if v.same or (v.accuracy or v.loss) is None or _fine(v)]
    return _take((proved or best)[0], proved=bool(proved))


def _take(of: Verdict, *, proved: bool) -> str:
    parts = []
    if of.speed and of.speed.low > 1:
        parts.append(f"{times(of.speed.value)} the speed")
    elif of.speed:
        parts.append("about as fast as O0")
    if of.memory and of.memory <= LESS:
        parts.append(f"{of.memory:.2f} times the memory")
    quality = of.accuracy or of.loss
    within = f"within {of.accuracy.margin:.2g} points" if of.accuracy else "within 5 %"
    what = "accuracy" if of.accuracy else of.loss_of
    has = f"{of.row.label}: {', '.join(parts)}"
    if quality is None:
        return f"Take {has}; its quality was not compared."
    if proved:
        return f"Take {has}, {what} {within}."
    more = f"; about {quality.needed} would" if quality.needed else ""
    unknown = f"{quality.seeds} seeds cannot tell whether its {what} is {within}"
    return f"Perhaps {has}. But {unknown}{more}."


def _fine(of: Verdict) -> bool:
    quality = of.accuracy or of.loss
    return quality is not None and quality.fine


def _bad(of: Verdict) -> bool:
    return any(judged is not None and judged.worse for judged in (of.accuracy, of.loss))


def _slower(of: Verdict) -> bool:
    return of.speed is None or of.speed.value < 1 / WORTH
