"""What the bench measured, as plain data: single runs, the file they are kept in, the table rows.

Nothing here trains or draws. A `Run` is one training at one level; a `Report` is all of them with
the machine they ran on; a `Row` is what the table says of one level at one batch size, over seeds.
"""

import dataclasses
import json
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "BASELINE",
    "Report",
    "Row",
    "Run",
    "Spread",
    "percentile",
    "read",
    "rows",
    "save",
    "write",
]

FORMAT = "apex bench 1"
BASELINE = "O0"

Status = Literal["ok", "diverged", "failed"]


@dataclass(frozen=True)
class Run:
    """One training: one level, one batch size, one seed.

    A run that ``failed`` keeps what it had measured until then; one that ``diverged`` ended with a
    loss or with outputs that are not finite.
    """

    level: str
    dtype: str
    batch: int
    seed: int
    status: Status
    error: str | None
    step_ms: tuple[float, ...]
    """Every step in order, in milliseconds; the first ``warm_up`` of them do not count."""
    warm_up: int
    losses: tuple[float, ...]
    """Training loss of every step."""
    epoch_accuracy: tuple[float, ...]
    """Test accuracy after each epoch, in per cent."""
    steps_per_epoch: int
    peak_bytes: int | None
    skipped: int
    """Optimizer steps left out because a gradient was not finite."""
    loss_scale: float | None
    """Loss scale after the last step."""

    @property
    def counted_ms(self) -> tuple[float, ...]:
        """The step times without the warm-up."""
        return self.step_ms[self.warm_up :]

    @property
    def epoch_losses(self) -> tuple[float, ...]:
        """Mean training loss of each finished epoch."""
        n = self.steps_per_epoch
        epochs = range(len(self.losses) // n)
        return tuple(statistics.fmean(self.losses[i * n : (i + 1) * n]) for i in epochs)


@dataclass(frozen=True)
class Report:
    """All runs, finished or failed, with what is needed to read and to repeat them."""

    environment: dict[str, Any]
    options: dict[str, Any]
    planned: int
    complete: bool
    notes: dict[str, str]
    """How the numbers were taken: a sentence for each of ``time``, ``memory``, ``quality``."""
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Spread:
    """Mean over the seeds and, from two seeds on, the sample standard deviation."""

    mean: float
    sd: float | None


@dataclass(frozen=True)
class Row:
    """One level at one batch size: its runs put together.

    A number is ``None`` where nothing was measured; ``speed`` and ``memory`` (times the value at
    O0) also where O0 at the same batch size was not.
    """

    level: str
    dtype: str
    batch: int
    planned: int
    finished: int
    problem: str | None
    ms_median: float | None
    ms_p10: float | None
    ms_p90: float | None
    speed: float | None
    peak_bytes: int | None
    memory: float | None
    loss: Spread | None
    accuracy: Spread | None
    skipped: int | None
    loss_scale: tuple[float, ...]
    """The different final values among the seeds, ascending."""

    @property
    def peak_mib(self) -> float | None:
        """The peak in units of 2**20 bytes."""
        return None if self.peak_bytes is None else self.peak_bytes / 2**20


def rows(report: Report) -> list[Row]:
    """Put the runs together, one row per batch size and level, in the order of the options."""
    return [
        row
        for batch in report.options["batch"]
        for row in _rows_at(report, batch, tuple(report.options["levels"].items()))
    ]


def _rows_at(report: Report, batch: int, levels: Sequence[tuple[str, str]]) -> list[Row]:
    seeds = int(report.options["seeds"])
    runs = {
        level: [run for run in report.runs if (run.level, run.batch) == (level, batch)]
        for level, _ in levels
    }
    plain = [
        _row(level, dtype, batch, seeds, runs[level], report.complete) for level, dtype in levels
    ]
    base = next((row for row in plain if row.level == BASELINE), None)
    return plain if base is None else [_relative(row, base) for row in plain]


def _row(
    level: str, dtype: str, batch: int, planned: int, runs: Sequence[Run], complete: bool
) -> Row:
    whole = [run for run in runs if run.status != "failed"]
    times = [ms for run in whole for ms in run.counted_ms]
    peaks = [run.peak_bytes for run in whole if run.peak_bytes is not None]
    return Row(
        level=level,
        dtype=dtype,
        batch=batch,
        planned=planned,
        finished=len(runs),
        problem=_problem(runs, planned, complete),
        ms_median=percentile(times, 50),
        ms_p10=percentile(times, 10),
        ms_p90=percentile(times, 90),
        speed=None,
        peak_bytes=max(peaks, default=None),
        memory=None,
        loss=_spread([run.epoch_losses[-1] for run in whole]),
        accuracy=_spread([run.epoch_accuracy[-1] for run in whole]),
        skipped=sum(run.skipped for run in runs) if runs else None,
        loss_scale=tuple(sorted({run.loss_scale for run in whole if run.loss_scale is not None})),
    )


def _relative(row: Row, base: Row) -> Row:
    speed = memory = None
    if row.ms_median and base.ms_median:
        speed = base.ms_median / row.ms_median
    if row.peak_bytes and base.peak_bytes:
        memory = row.peak_bytes / base.peak_bytes
    return dataclasses.replace(row, speed=speed, memory=memory)


def _problem(runs: Sequence[Run], planned: int, complete: bool) -> str | None:
    """Say what is wrong with these runs, or ``None`` if all went well."""
    failed = [run for run in runs if run.status == "failed"]
    diverged = [run for run in runs if run.status == "diverged"]
    found = []
    if failed:
        found.append(f"failed{_share(failed, planned)}: {failed[0].error}")
    if diverged:
        found.append(f"diverged{_share(diverged, planned)}")
    if not complete and len(runs) < planned:
        found.append(f"{len(runs)} of {planned} runs" if runs else "not run")
    return "; ".join(found) or None


def _share(part: Sequence[Run], planned: int) -> str:
    return f" ({len(part)} of {planned})" if planned > 1 else ""


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return Spread(sum(values), None)  # inf or nan, whichever the values make
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), sd)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Interpolate linearly between the two nearest ranks; ``None`` of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def write(report: Report, path: Path) -> None:
    """Write the report as JSON, whole or not at all: an interruption leaves the former file.

    Numbers that JSON lacks are the strings ``"nan"``, ``"inf"`` and ``"-inf"``. The rows of the
    table are in the file too, for readers; `read` computes them anew.
    """
    content = {
        "format": FORMAT,
        **dataclasses.asdict(report),
        "rows": [dataclasses.asdict(row) for row in rows(report)],
    }
    save(content, path)


def save(content: dict[str, Any], path: Path) -> None:
    """Write JSON whole or not at all; `write` says what becomes of inf and nan."""
    text = json.dumps(_jsonable(content), indent=1, allow_nan=False)
    # A list of numbers goes on one line. Strings are safe: there is no bare line break in them.
    text = re.sub(r"\[\n[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:  # an interruption too leaves no litter
        temporary.unlink(missing_ok=True)


def read(path: Path) -> Report:
    """Read back what `write` wrote; every number is the same to the last bit.

    Raises:
        ValueError: The file is not a report of this format.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path.name} is not a report that apex bench writes (form {FORMAT!r})")
    runs = tuple(_run(fields) for fields in content["runs"])
    names = [field.name for field in dataclasses.fields(Report) if field.name != "runs"]
    return Report(**{name: content[name] for name in names}, runs=runs)


def _run(fields: dict[str, Any]) -> Run:
    values = dict(fields)
    for name in ("step_ms", "losses", "epoch_accuracy"):
        values[name] = tuple(map(float, fields[name]))
    if values["loss_scale"] is not None:
        values["loss_scale"] = float(fields["loss_scale"])
    return Run(**values)


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
