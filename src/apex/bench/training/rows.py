"""The runs of a level at a batch size, put together over the seeds.

Tables, CSV, plots and the page show these rows, and `verdict` compares them.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from apex.bench.intervals import percentile
from apex.bench.training.precision import LEVELS
from apex.bench.training.results import Cell, Operator, Report, Run

__all__ = ["BASELINE", "Row", "mean", "rows"]

T = TypeVar("T")

BASELINE = "O0"
UNSTEADY = 2.0  # times the median: a machine on which one step in ten takes longer is busy


@dataclass(frozen=True)
class Row:
    """One level of a task at one batch size. A number is ``None`` where nothing was measured."""

    cells: tuple[Cell, ...]
    """Planned, a seed each."""
    runs: tuple[Run, ...]
    """By ascending seed; O0 has several of a seed where not all levels fit in memory together."""
    report: Report

    @property
    def task(self) -> str:
        """The task's name."""
        return self.cells[0].task

    @property
    def batch(self) -> int:
        """Samples in a step."""
        return self.cells[0].batch

    @property
    def label(self) -> str:
        """`Cell.label`."""
        return self.cells[0].label

    @property
    def level(self) -> str:
        """The level without TF32."""
        return self.cells[0].level

    @property
    def dtype(self) -> str:
        """What most matrix products compute in."""
        return LEVELS[self.level]

    @cached_property
    def finished(self) -> tuple[Run, ...]:
        """Runs that came to their end, one of a seed."""
        return tuple({run.cell.seed: run for run in self.runs if run.finished}.values())

    @property
    def stopped(self) -> Run | None:
        """A run that the time budget stopped."""
        return next((run for run in self.runs if run.status == "stopped"), None)

    @property
    def timed(self) -> tuple[Run, ...]:
        """Runs whose times count: those that finished, and those that were stopped."""
        return tuple(run for run in self.runs if run.finished or run.status == "stopped")

    @cached_property
    def step_ms(self) -> tuple[float, ...]:
        """Every step that counts, all seeds together, also of runs that were stopped."""
        return tuple(ms for run in self.timed for ms in run.counted_ms)

    @property
    def ms(self) -> float | None:
        """The median step time."""
        return percentile(self.step_ms, 50)

    @property
    def unsteady(self) -> bool:
        """Whether steps take twice their median now and then."""
        slow = percentile(self.step_ms, 90)
        return bool(self.ms and slow and slow > UNSTEADY * self.ms)

    @property
    def data_ms(self) -> float | None:
        """The median time for a batch."""
        return percentile([ms for run in self.finished for ms in run.data_ms], 50)

    @property
    def inference_ms(self) -> float | None:
        """The median time of forward and loss in evaluation mode."""
        return percentile([ms for run in self.finished for ms in run.inference_ms], 50)

    @property
    def samples_s(self) -> float | None:
        """Samples a second in whole epochs, data included."""
        seconds = sum(sum(run.epoch_seconds) for run in self.finished)
        samples = sum(len(run.losses) for run in self.finished) * self.batch
        return samples / seconds if seconds else None

    @property
    def host_ms(self) -> float | None:
        """On a GPU: until the calls of a step had returned."""
        return self._first(lambda run: run.host_ms)

    @property
    def peak_bytes(self) -> int | None:
        """Of tensors."""
        return self._first(lambda run: run.peak_bytes)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """What a step consists of."""
        return self._first(lambda run: run.operators or None) or ()

    @property
    def accuracies(self) -> tuple[float, ...]:
        """After the last epoch, a seed each."""
        return tuple(run.accuracy[-1] for run in self.finished if run.accuracy)

    @property
    def test_losses(self) -> tuple[float, ...]:
        """The same of the mean loss on the test set."""
        return tuple(run.test_loss[-1] for run in self.finished if run.test_loss)

    @property
    def final_losses(self) -> tuple[float, ...]:
        """Mean training loss of the last epoch, a seed each."""
        return tuple(run.final_loss for run in self.finished if run.final_loss is not None)

    @property
    def skipped(self) -> int | None:
        """Skipped steps, all seeds together."""
        return sum(run.skipped for run in self.runs) if self.runs else None

    @property
    def scale_ends(self) -> tuple[float, ...]:
        """Loss scales of the first and the last steps: different values, ascending."""
        ends = {s for run in self.finished for s in (*run.scales[:1], *run.scales[-1:])}
        return tuple(sorted(ends))

    @property
    def cut(self) -> bool:
        """Whether the time budget left steps out."""
        return any(len(run.losses) < run.planned_steps for run in self.finished)

    @cached_property
    def seconds_to_target(self) -> float | None:
        """Training time until the accuracy of ``--target``: the median over the seeds.

        ``None`` where a seed did not reach it.
        """
        target, times = self.report.target, []
        if len(self.finished) < len({run.cell for run in self.runs}):
            return None
        for run in self.finished:
            reached = [a >= target for a in run.accuracy] if target is not None else []
            if True not in reached:
                return None
            times.append(sum(run.epoch_seconds[: reached.index(True) + 1]))
        return statistics.median(times) if times else None

    @property
    def problem(self) -> str | None:
        """What is wrong with these runs, or ``None`` if all went well."""
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

    def _first(self, of: Callable[[Run], T | None]) -> T | None:
        return next((value for run in self.runs if (value := of(run)) is not None), None)


def rows(report: Report) -> list[Row]:
    """Put the runs together, in the order of the plan: a row per task, batch size and label."""
    cells: dict[tuple[str, int, str], list[Cell]] = {}
    runs: dict[tuple[str, int, str], list[Run]] = {}
    for cell in report.plan:
        cells.setdefault((cell.task, cell.batch, cell.label), []).append(cell)
    for run in sorted(report.runs, key=lambda run: run.cell.seed):
        runs.setdefault((run.cell.task, run.cell.batch, run.cell.label), []).append(run)
    return [Row(tuple(of), tuple(runs.get(key, ())), report) for key, of in cells.items()]


def mean(values: Sequence[float]) -> float | None:
    """Average; inf or nan where the values have such; ``None`` of nothing."""
    if not values:
        return None
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values)
