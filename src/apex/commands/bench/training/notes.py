"""What stands beside the numbers of a report: warnings, notes, problems, how it was measured."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from apex.commands.bench import memory
from apex.commands.bench.training.profiling import FEW_STEPS
from apex.commands.bench.training.results import BUSY, Results
from apex.commands.bench.training.rows import BASELINE, LevelRow, rows
from apex.commands.bench.training.turns import BLOCK
from apex.commands.bench.training.verdict import (
    LOSS_MARGIN,
    NOISY,
    UNEVEN,
    Verdict,
    same_arithmetic,
)

__all__ = ["LEFT_OUT", "how_measured", "marks", "notes", "problems", "source"]

LEFT_OUT = "native-fp16 left out"  # a key of `Results.notes`
AGREE = 1.05  # times: what rounding and the spread of steps leave between two columns


def source(environment: dict[str, Any]) -> str:
    """Say in one line what machine and versions the numbers are from."""
    versions = environment["versions"]
    return f"{environment['device']['name']}, torch {versions['torch']}, apex {versions['apex']}"


def marks(report: Results) -> list[str]:
    """Say what keeps these numbers from being a full result."""
    found, made = [], rows(report)
    if not report.complete:
        found.append(f"INCOMPLETE: {len({r.cell for r in report.runs})} of {len(report.plan)} runs")
    if report.quick:
        found.append("QUICK: less data")
    if report.busy:
        found.append(f"BUSY MACHINE: {report.busy}")
    elif any(row.unsteady for row in made):
        found.append(f"UNEVEN: {UNEVEN}")
    if cut := _cut(report, made):
        found.append(f"CUT to {report.budget_s:g} s: {cut}")
    return found


def _cut(report: Results, made: Sequence[LevelRow]) -> str:
    """Say what a time budget has left out."""
    stopped = [row.label for row in made if row.stopped]
    trained = [run for row in made for run in row.finished if run.planned_steps]
    parts = [f"{', '.join(dict.fromkeys(stopped))} stopped"] if stopped else []
    if any(row.cut for row in made):
        share = statistics.fmean(len(run.losses) / run.planned_steps for run in trained)
        who = "the others" if stopped else "all"
        parts.append(f"{who} trained for {100 * share:.0f} % of their steps on average")
    if report.left_out:
        parts.append(f"no time for {report.left_out} more trainings (the last seeds)")
    if parts and report.budget_s and report.seconds > report.budget_s:
        took = f"this took {report.seconds:.0f} s"
        parts.append(f"{took}, because the first steps of all levels do not fit into the budget")
    return "; ".join(parts)


def notes(report: Results, verdicts: Sequence[Verdict]) -> list[str]:
    """Say once what holds for several levels."""
    made, found = rows(report), []
    if why := report.notes.get(LEFT_OUT):
        found.append(f"native-fp16 was not trained: {why} (`--levels O0 native-fp16` trains it).")
    for task in dict.fromkeys(row.task for row in made):
        here = [row for row in made if row.task == task]
        found += [*_same(here), *([] if report.quick else _of_test_set(here)), *_unlearnt(here)]
    found += _columns_apart(verdicts)
    apart = []
    for v in verdicts:
        sizes = {len(run.together) for run in (*v.row.runs, *v.other.runs) if run.together}
        if len(sizes) > 1 and any(len(run.together) == min(sizes) for run in v.row.runs):
            apart.append(v.row.label)
    if apart:
        found.append(
            f"{', '.join(dict.fromkeys(apart))}: apex trained these again with only O0, or alone, "
            "because the memory did not suffice for all levels or the process died. The speed of a "
            "level trained alone includes the machine's drift."
        )
    return found


def _same(here: Sequence[LevelRow]) -> list[str]:
    """Say which levels of a task are the same arithmetic, and at which batch sizes."""
    found: dict[tuple[str, ...], list[str]] = {}
    for batch in dict.fromkeys(row.batch for row in here):
        for same in same_arithmetic([row for row in here if row.batch == batch]):
            found.setdefault(tuple(row.label for row in same), []).append(str(batch))
    return [
        f"{', '.join(labels[:-1])} and {labels[-1]} have the same losses to the last bit on "
        f"{here[0].task} at batch size {', '.join(batches)}, so their arithmetic is the same."
        for labels, batches in found.items()
    ]


def _of_test_set(here: Sequence[LevelRow]) -> list[str]:
    """Say how far the size of the test set alone moves an accuracy."""
    for row in here:
        size = next((run.test_size for run in row.finished if run.test_size), None)
        if size and row.accuracies:
            share = min(max(statistics.fmean(row.accuracies) / 100, 1 / size), 1 - 1 / size)
            points = 196 * math.sqrt(share * (1 - share) / size)
            return [
                f"{row.task} has {size} test samples. Another test set of that size would move an "
                f"accuracy of {100 * share:.1f} % by up to {points:.1f} points (95 %). All levels "
                "are judged by the same samples."
            ]
    return []


def _unlearnt(here: Sequence[LevelRow]) -> list[str]:
    """Say which accuracies of a task show that nothing was learnt."""
    found: dict[str, list[str]] = {}
    for row in here:
        if row.unlearnt:
            accuracy = statistics.fmean(row.accuracies)
            found.setdefault(row.unlearnt, []).append(
                f"{row.label} (batch size {row.batch}: {accuracy:.1f} %)"
            )
    return [
        f"On {here[0].task} the accuracy of {', '.join(labels)} is {why}. It says nothing about "
        "the precision."
        for why, labels in found.items()
    ]


def _columns_apart(verdicts: Sequence[Verdict]) -> list[str]:
    """Say where the columns of times and of speeds do not agree, and why they need not."""
    apart = []
    for v in verdicts:
        if v.other.level == BASELINE and v.ratio and v.speed and v.row.ms and v.other.ms:
            medians = v.other.ms / v.row.ms
            if abs(math.log(medians / v.ratio)) > math.log(AGREE):
                where = f"{v.row.label} against {v.other.label} (batch size {v.row.batch})"
                apart.append(f"{where}: {medians:.2f} by the times, {v.ratio:.2f} by the speed")
    if not apart:
        return []
    return [
        "The times and the speeds do not agree, because the speed of the machine changed: "
        f"{'; '.join(apart)}. A time is the median over all steps of all seeds; a speed compares "
        "steps that were taken one after the other, so trust the speed."
    ]


def problems(report: Results) -> list[tuple[str, str]]:
    """List where something went wrong, and what; the same at several batch sizes is one line."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows(report):
        if row.problem and not row.stopped:  # a sentence says that
            found.setdefault((row.label, row.task, row.problem), []).append(str(row.batch))
    return [
        (f"{label} ({task}, batch size {', '.join(batches)})", problem)
        for (label, task, problem), batches in found.items()
    ]


def how_measured(device: torch.device) -> dict[str, str]:
    """Say how the numbers of a `Run` and a `Verdict` are measured and computed."""
    clock = "CUDA events" if device.type == "cuda" else "the host's clock"
    return {
        "time of a step": "milliseconds from zero_grad to the end of step (forward, loss, "
        f"backward, optimizer) by {clock}, without the time for data",
        "turns": f"the levels of a seed take turns in one process, {BLOCK} steps or more each, in "
        "an order drawn from the seed and then its reverse; the first round and the first step "
        "of each turn do not count. The machine counts as busy if other programs had the "
        f"processor for {100 * BUSY:.0f} % of that time. apex compares the clock with the "
        "processor time of the training thread, if the system counts involuntary switches",
        "speed": "for each seed, the median over pairs of rounds of O0's median step time divided "
        "by the level's; the interval over the seeds is Student's t, 95 % each. There is no "
        "verdict if one step in ten takes twice the median, if the interval spans a factor "
        f"of {NOISY:g}, or if the machine was busy",
        "accuracy": "after the last epoch, on data not used for training. The spread over the "
        "seeds is pooled over the levels, once for the differences from O0 and once for the "
        "accuracies; the wider interval (Student's t) counts. It is corrected for the number "
        "of comparisons (Bonferroni), counting levels with the same losses once, so all "
        "differences from O0 on a page hold together with 95 %. The standard deviation of "
        "differences is at least one sample of the test set divided by the root of 2. A level "
        "is within the margin if its interval is",
        "loss": "mean loss on the same data, which shows smaller differences than the accuracy. "
        f"The same rule applies, with 95 % of its own and a margin of {100 * LOSS_MARGIN:g} %. "
        "For a task without a test loss, the training loss of the last epoch",
        "memory": f"peak bytes of tensors in a separate training of {FEW_STEPS} steps, above what "
        "was in use before it: weights, masters, gradients, optimizer state, activations, "
        f"batch (from {memory.source(device)}; without the scratch space of libraries)",
        "operators": "from torch's profiler, in one separate step, each without the operators it "
        "calls",
        "inference": "forward and loss of a training batch in evaluation mode, also in turns",
    }
