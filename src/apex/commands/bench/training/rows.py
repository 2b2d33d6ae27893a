"""The runs of a level at a batch size, put together over the seeds.

Tables, CSV, plots and the page show these rows, and `verdict` compares them.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from apex.commands.bench.intervals import percentile
from apex.commands.bench.training.precision import LEVELS
from apex.commands.bench.training.results import Cell, Results, Run

__all__ = ["BASELINE", "LevelRow", "mean", "rows"]

T = TypeVar("T")

BASELINE = "O0"
UNSTEADY = 2.0  # times the median, that one step in ten takes: such times are no measurement
WHOLE = 90.0  # per cent of the planned steps: a shorter training is one that was cut


class LevelRow:
    """One level of a task at one batch size. A number is ``None`` where nothing was measured.

    Attributes:
        cells: Planned, a seed each. Their ``task``, ``batch``, ``label`` (`Cell.label`) and
            ``level`` (without TF32) are the row's.
        runs: By ascending seed; O0 has several of a seed where not all levels fit in memory
            together.
        report: That they are from.
        dtype: What most matrix products compute in.
        finished: Runs that came to their end, one of a seed.
        stopped: A run that the time budget stopped.
        timed: Runs whose times count: those that finished, and those that were stopped.
        ms: The median of every step that counts, all seeds together, also of runs that were
            stopped.
        unsteady: Whether steps take twice their median now and then.
        data_ms: The median time for a batch.
        inference_ms: The median time of forward and loss in evaluation mode.
        samples_s: Samples a second in whole epochs, data included.
        host_ms, peak_bytes, operators: Of the first run that has them.
        accuracies, test_losses: After the last epoch, a seed each.
        arithmetic: The seeds and losses of `finished`: levels that have the same compute the same.
        unlearnt: If the accuracy is no better than that of guessing or of the untrained model,
            words that say so.
        final_losses: Mean training loss of the last epoch, a seed each.
        skipped: Skipped steps, all seeds together.
        scale_ends: Loss scales of the first and the last steps: different values, ascending.
        cut: Per cent of the planned steps that the shortest training took, if the time budget left
            out more than a tenth of them.
        seconds_to_target: Training time until the accuracy of ``--target``, the median over the
            seeds; ``None`` where a seed did not reach it.
        problem: What is wrong with these runs, or ``None`` if all went well.
    """

    def __init__(self, cells: Sequence[Cell], runs: Sequence[Run], report: Results) -> None:
        first = cells[0]
        self.cells, self.runs, self.report = tuple(cells), tuple(runs), report
        self.task, self.batch, self.label, self.level = (
            first.task, first.batch, first.label, first.level,
        )  # fmt: skip
        self.dtype = LEVELS[self.level]
        self.finished = tuple({run.cell.seed: run for run in runs if run.finished}.values())
        self.arithmetic = tuple((run.cell.seed, run.losses) for run in self.finished)
        self.stopped = next((run for run in runs if run.status == "stopped"), None)
        self.timed = tuple(run for run in runs if run.finished or run.status == "stopped")

        steps = [ms for run in self.timed for ms in run.counted_ms]
        self.ms, slow = percentile(steps, 50), percentile(steps, 90)
        self.unsteady = bool(self.ms and slow and slow > UNSTEADY * self.ms)
        self.data_ms = self._median(lambda run: run.data_ms)
        self.inference_ms = self._median(lambda run: run.inference_ms)
        seconds = sum(sum(run.epoch_seconds) for run in self.finished)
        samples = sum(len(run.losses) for run in self.finished) * self.batch
        self.samples_s = samples / seconds if seconds else None
        self.host_ms = self._first(lambda run: run.host_ms)
        self.peak_bytes = self._first(lambda run: run.peak_bytes)
        self.operators = self._first(lambda run: run.operators or None) or ()

        self.accuracies = tuple(run.accuracy[-1] for run in self.finished if run.accuracy)
        self.test_losses = tuple(run.test_loss[-1] for run in self.finished if run.test_loss)
        losses = (run.final_loss for run in self.finished)
        self.final_losses = tuple(loss for loss in losses if loss is not None)
        self.skipped = sum(run.skipped for run in runs) if runs else None
        ends = {s for run in self.finished for s in (*run.scales[:1], *run.scales[-1:])}
        self.scale_ends = tuple(sorted(ends))
        whole = [run for run in self.finished if run.planned_steps]
        cut = min((100 * len(run.losses) / run.planned_steps for run in whole), default=100.0)
        self.cut = cut if cut < WHOLE else None
        self.seconds_to_target = self._seconds_to_target()
        self.problem = self._problem()
        self.unlearnt = self._unlearnt()

    def _median(self, of: Callable[[Run], Sequence[float]]) -> float | None:
        return percentile([ms for run in self.finished for ms in of(run)], 50)

    def _first(self, of: Callable[[Run], T | None]) -> T | None:
        return next((value for run in self.runs if (value := of(run)) is not None), None)

    def _seconds_to_target(self) -> float | None:
        target, times = self.report.target, []
        if len(self.finished) < len({run.cell for run in self.runs}):
            return None
        for run in self.finished:
            reached = [a >= target for a in run.accuracy] if target is not None else []
            if True not in reached:
                return None
            times.append(sum(run.epoch_seconds[: reached.index(True) + 1]))
        return statistics.median(times) if times else None

    def _unlearnt(self) -> str | None:
        """Compare the accuracy with that of guessing, else with that before the training.

        What the size of the test set alone moves an accuracy by, with 95 %, is no learning.
        """
        size = next((run.test_size for run in self.finished if run.test_size), None)
        known = [run for run in self.report.runs if run.cell.task == self.task]
        accuracy = mean(self.accuracies)
        guessed, before = [run.chance for run in known], [run.untrained for run in known]
        for words, given in (
            ("at chance level: guessing gets {:.1f} % right", guessed),
            ("not clearly better than before the training, {:.1f} %", before),
        ):
            base = next((value for value in given if value is not None), None)
            if base is None or accuracy is None:
                continue
            share = min(max(base / 100, 0.0), 1.0)
            reach = 196 * math.sqrt(share * (1 - share) / size) if size else 0.0
            if accuracy <= base + reach:
                return words.format(base)
        return None

    def _problem(self) -> str | None:
        found = []
        for status in ("failed", "out of memory", "diverged", "stopped"):
            such = [run for run in self.runs if run.status == status]
            if such:
                count = len({run.cell for run in such})
                share = f" ({count} of {len(self.cells)})" if len(self.cells) > 1 else ""
                found.append(such[0].error or status if status == "stopped" else f"{status}{share}")
                found[-1] += f": {such[0].error}" if status == "failed" else ""
        missing = len(self.cells) - len({run.cell for run in self.runs})
        if missing:
            found.append(f"{len(self.cells) - missing} of {len(self.cells)} runs")
        return "; ".join(found) or None


def rows(report: Results) -> list[LevelRow]:
    """Put the runs together, in the order of the plan: a row per task, batch size and label."""
    cells: dict[tuple[str, int, str], list[Cell]] = {}
    runs: dict[tuple[str, int, str], list[Run]] = {}
    for cell in report.plan:
        cells.setdefault((cell.task, cell.batch, cell.label), []).append(cell)
    for run in sorted(report.runs, key=lambda run: run.cell.seed):
        runs.setdefault((run.cell.task, run.cell.batch, run.cell.label), []).append(run)
    return [LevelRow(of, runs.get(key, ()), report) for key, of in cells.items()]


def mean(values: Sequence[float]) -> float | None:
    """Average; inf or nan where the values have such; ``None`` of nothing."""
    if not values:
        return None
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values)
