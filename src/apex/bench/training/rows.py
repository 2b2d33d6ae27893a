"""One line of a table: the runs of a level at a batch size, put together over the seeds.

Tables, CSV, plots and the HTML report show these rows, and comparisons read them.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from apex.bench.intervals import percentile
from apex.bench.training.precision import LEVELS
from apex.bench.training.results import Cell, Report, Run

__all__ = ["BASELINE", "Row", "Spread", "baseline_of", "rows", "runs_of"]

BASELINE = "O0"


@dataclass(frozen=True)
class Spread:
    """Mean over the seeds and, from two seeds on, the sample standard deviation."""

    mean: float
    sd: float | None


@dataclass(frozen=True)
class Row:
    """One level of a task at one batch size.

    A number is ``None`` where nothing was measured; ``speed`` and ``memory`` (times the value at
    the baseline, O0, with TF32 off where that is a choice) also where that was not measured.
    """

    task: str
    label: str
    """`apex.bench.training.results.Cell.label`."""
    level: str
    dtype: str
    batch: int
    planned: int
    runs: int
    problem: str | None
    ms_median: float | None
    ms_p10: float | None
    ms_p90: float | None
    data_ms: float | None
    host_ms: float | None
    replay_ms: float | None
    samples_s: float | None
    """With the time for data."""
    seconds: Spread | None
    """Of all epochs."""
    speed: float | None
    """Step time at the baseline divided by this one: above 1 is faster."""
    peak_bytes: int | None
    """Of tensors."""
    memory: float | None
    process_bytes: int | None
    loss: Spread | None
    """Mean training loss of the last epoch."""
    accuracy: Spread | None
    skipped: int | None
    scale_ends: tuple[float, ...]
    """Loss scale of the first and the last step, over the seeds: different values, ascending."""
    joules_per_sample: float | None
    of_flops: float | None
    """Share of the measured ceiling of matrix products in the row's dtype."""
    of_bytes: float | None
    """Share of the measured bandwidth."""

    @property
    def peak_mib(self) -> float | None:
        """The peak in units of 2**20 bytes."""
        return None if self.peak_bytes is None else self.peak_bytes / 2**20


def rows(report: Report) -> list[Row]:
    """Put the runs together, in the order of the plan: a row per task, batch size and label."""
    keys = list(dict.fromkeys((c.task, c.batch, c.label) for c in report.plan))
    made = {key: _row(report, [c for c in report.plan if _key(c) == key]) for key in keys}
    return [_relative(row, baseline_of(row, list(made.values()))) for row in made.values()]


def runs_of(report: Report, row: Row) -> list[Run]:
    """Return the runs of a row, by ascending seed."""
    mine = [run for run in report.runs if _key(run.cell) == (row.task, row.batch, row.label)]
    return sorted(mine, key=lambda run: run.cell.seed)


def baseline_of(row: Row, among: Sequence[Row]) -> Row | None:
    """Find the row of O0, TF32 off where that is a choice, at the same task and batch size."""
    labels = (BASELINE, f"{BASELINE} TF32 off")
    same = [r for r in among if (r.task, r.batch) == (row.task, row.batch)]
    return next((r for r in same if r.label in labels), None)


def _key(cell: Cell) -> tuple[str, int, str]:
    return cell.task, cell.batch, cell.label


def _row(report: Report, cells: Sequence[Cell]) -> Row:
    cell = cells[0]
    runs = [run for run in report.runs if _key(run.cell) == _key(cell)]
    whole = [run for run in runs if run.finished]
    times = [ms for run in whole for ms in run.counted_ms]
    median = percentile(times, 50)
    spent = [sum(run.epoch_seconds) for run in whole]
    samples = [len(run.step_ms) * cell.batch for run in whole]
    joules = [run.joules for run in whole if run.joules is not None]
    flops, moved = _median_of(whole, "flops"), _median_of(whole, "moved_bytes")
    products = LEVELS[cell.level] + (" TF32" if cell.tf32 and LEVELS[cell.level] == "fp32" else "")
    top_flops = report.ceilings.get(f"flops {products}")
    return Row(
        task=cell.task,
        label=cell.label,
        level=cell.level,
        dtype=LEVELS[cell.level],
        batch=cell.batch,
        planned=len(cells),
        runs=len(runs),
        problem=_problem(runs, len(cells), report.complete),
        ms_median=median,
        ms_p10=percentile(times, 10),
        ms_p90=percentile(times, 90),
        data_ms=percentile([ms for run in whole for ms in run.data_ms], 50),
        host_ms=_median_of(whole, "host_ms"),
        replay_ms=_median_of(whole, "replay_ms"),
        samples_s=sum(samples) / sum(spent) if sum(spent) else None,
        seconds=_spread(spent),
        speed=None,
        peak_bytes=max((r.peak_tensor_bytes for r in whole if r.peak_tensor_bytes), default=None),
        memory=None,
        process_bytes=max(
            (r.peak_process_bytes for r in whole if r.peak_process_bytes), default=None
        ),
        loss=_spread([run.epoch_losses[-1] for run in whole if run.epoch_losses]),
        accuracy=_spread([run.accuracy[-1] for run in whole if run.accuracy]),
        skipped=sum(run.skipped for run in runs) if runs else None,
        scale_ends=tuple(sorted({s for r in whole for s in (*r.scales[:1], *r.scales[-1:])})),
        joules_per_sample=sum(joules) / sum(samples)
        if joules and len(joules) == len(whole)
        else None,
        of_flops=_share(flops, median, top_flops),
        of_bytes=_share(moved, median, report.ceilings.get("bytes")),
    )


def _share(amount: float | None, ms: float | None, ceiling: float | None) -> float | None:
    return amount / (ms / 1000) / ceiling if amount and ms and ceiling else None


def _median_of(runs: Sequence[Run], name: str) -> float | None:
    values = [getattr(run, name) for run in runs]
    return percentile([value for value in values if value is not None], 50)


def _relative(row: Row, base: Row | None) -> Row:
    if base is None:
        return row
    speed = memory = None
    if row.ms_median and base.ms_median:
        speed = base.ms_median / row.ms_median
    if row.peak_bytes and base.peak_bytes:
        memory = row.peak_bytes / base.peak_bytes
    return dataclasses.replace(row, speed=speed, memory=memory)


def _problem(runs: Sequence[Run], planned: int, complete: bool) -> str | None:
    """Say what is wrong with these runs, or ``None`` if all went well."""
    found = []
    for status in ("failed", "out of memory", "diverged"):
        such = [run for run in runs if run.status == status]
        if such:
            share = f" ({len(such)} of {planned})" if planned > 1 else ""
            why = f": {such[0].error}" if status == "failed" else ""
            found.append(f"{status}{share}{why}")
    if not complete and len(runs) < planned:
        found.append(f"{len(runs)} of {planned} runs" if runs else "not run")
    return "; ".join(found) or None


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return Spread(sum(values), None)  # inf or nan, whichever the values make
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), sd)
