"""What stands beside the numbers of a report: warnings, notes, problems."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from apex.bench.training.results import Largest, Report
from apex.bench.training.rows import Row, rows
from apex.bench.training.verdict import BUSY, Verdict, same_arithmetic

__all__ = ["largest_said", "marks", "notes", "problems", "source"]


def source(environment: dict[str, Any]) -> str:
    """Say in one line what machine and versions the numbers are from."""
    versions = environment["versions"]
    return f"{environment['device']['name']}, torch {versions['torch']}, apex {versions['apex']}"


def marks(report: Report) -> list[str]:
    """Say what keeps these numbers from being a full result."""
    found, made = [], rows(report)
    if not report.complete:
        found.append(f"INCOMPLETE: {len({r.cell for r in report.runs})} of {len(report.plan)} runs")
    if report.quick:
        found.append("QUICK: less data")
    if any(row.unsteady for row in made):
        found.append(f"BUSY MACHINE: {BUSY}")
    if cut := _cut(made):
        found.append(f"CUT to {report.budget_s:g} s: {cut}")
    return found


def _cut(made: Sequence[Row]) -> str:
    """Say what a time budget has left out."""
    stopped = [row.label for row in made if row.stopped]
    trained = [run for row in made for run in row.finished if run.planned_steps]
    said = [f"{', '.join(dict.fromkeys(stopped))} stopped"] if stopped else []
    if any(row.cut for row in made):
        share = statistics.fmean(len(run.losses) / run.planned_steps for run in trained)
        who = "the others" if stopped else "all"
        said.append(f"{who} trained for {100 * share:.0f} % of their steps on average")
    return "; ".join(said)


def notes(report: Report, verdicts: Sequence[Verdict]) -> list[str]:
    """Say once what holds for several levels."""
    made, found = rows(report), []
    for task in dict.fromkeys(row.task for row in made):
        here = [row for row in made if row.task == task]
        found += [*_same(here), *_of_test_set(here)]
    apart = [v.row.label for v in verdicts if _apart(v)]
    if apart:
        found.append(
            f"{', '.join(dict.fromkeys(apart))}: trained again with O0 alone, or alone (then the "
            "machine's drift is in its speed), since there was no memory beside the others, or the "
            "process died."
        )
    return found


def _same(here: Sequence[Row]) -> list[str]:
    """Say which levels of a task are the same arithmetic, and at which batch sizes."""
    found: dict[tuple[str, ...], list[str]] = {}
    for batch in dict.fromkeys(row.batch for row in here):
        for same in same_arithmetic([row for row in here if row.batch == batch]):
            found.setdefault(tuple(row.label for row in same), []).append(str(batch))
    return [
        f"{', '.join(labels[:-1])} and {labels[-1]} have the same losses to the last bit on "
        f"{here[0].task} at batch size {', '.join(batches)}: the same arithmetic."
        for labels, batches in found.items()
    ]


def _of_test_set(here: Sequence[Row]) -> list[str]:
    """Say how far the size of the test set alone moves an accuracy."""
    for row in here:
        size = next((run.test_size for run in row.finished if run.test_size), None)
        if size and row.accuracies:
            share = min(max(statistics.fmean(row.accuracies) / 100, 1 / size), 1 - 1 / size)
            points = 196 * math.sqrt(share * (1 - share) / size)
            return [
                f"{row.task} has {size} test samples: another test set of that size would move an "
                f"accuracy of {100 * share:.1f} % by up to {points:.1f} points (95 %). All levels "
                "are judged by the same samples."
            ]
    return []


def _apart(verdict: Verdict) -> bool:
    sizes = {len(run.together) for run in (*verdict.row.runs, *verdict.other.runs) if run.together}
    return len(sizes) > 1 and any(len(run.together) == min(sizes) for run in verdict.row.runs)


def problems(report: Report) -> list[tuple[str, str]]:
    """List where something went wrong, and what; the same at several batch sizes is one line."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows(report):
        if row.problem and not row.stopped:  # a sentence says that
            found.setdefault((row.label, row.task, row.problem), []).append(str(row.batch))
    return [
        (f"{label} ({task}, batch size {', '.join(batches)})", problem)
        for (label, task, problem), batches in found.items()
    ]


def largest_said(found: Largest) -> str:
    """Say what ``--batch max`` found of a level."""
    said = f"{found.task}, {found.level}: the largest batch that fits into "
    said += f"{found.limit_bytes / 2**20:,.0f} MiB is {found.batch}"
    return f"{said}, where the search ended: {found.error}" if found.error else said
