"""What `apex bench` measured, as plain data, and the file that it is kept in."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from apex.commands.bench.training.precision import LEVELS
from apex.commands.command_line import UsageError
from apex.commands.tables import save

__all__ = ["BUSY", "FORMAT", "Cell", "Operator", "Results", "Run", "decode", "disturbed", "read"]
__all__ += ["write"]

FORMAT = "apex bench 4"
BUSY = 0.1  # share of the time; 0.00 to 0.02 on an idle machine, 0.33 and more beside a busy loop

Status = Literal["ok", "diverged", "stopped", "out of memory", "failed"]


@dataclass(frozen=True)
class Cell:
    """One training of the matrix: everything that decides its numbers but the machine."""

    task: str
    level: str
    """One of `apex.commands.bench.training.precision.LEVELS`."""
    tf32: bool | None
    """Whether float32 products may use TF32; ``None`` on a device that has none."""
    batch: int
    seed: int
    optimizer: str
    lr: float
    epochs: int
    compile: bool
    quick: bool
    """Whether the task took less data."""

    @property
    def label(self) -> str:
        """The level as tables and plots name it, with TF32 where that is a choice."""
        return (
            self.level if self.tf32 is None else f"{self.level} TF32 {'on' if self.tf32 else 'off'}"
        )


@dataclass(frozen=True)
class Operator:
    """What one operator of torch takes of a training step, in one dtype."""

    name: str
    dtype: str
    """Of its first tensor: float32, float16 ...; empty where it has none."""
    ms: float
    """Per step, without the operators that it calls; with the profiler's own time."""


@dataclass(frozen=True)
class Run:
    """What was measured of a cell.

    A run that was ``stopped``, ``failed`` or was ``out of memory`` keeps what it had measured until
    then. One that ``diverged`` ended with a loss or weights that are not finite.
    """

    cell: Cell
    status: Status
    error: str | None = None
    """Why it was stopped or failed."""
    together: tuple[str, ...] = ()
    """Labels of the trainings that took turns in its process, its own among them."""
    blocks: tuple[int, ...] = ()
    """The step with which each of its turns began, counted from 0."""
    step_ms: tuple[float, ...] = ()
    """Every step in order, from zero_grad to the end of step. By the host's clock on a CPU, by CUDA
    events on a GPU. Those of the first turn, and the first of every turn, do not count."""
    data_ms: tuple[float, ...] = ()
    """Before each step, until its batch was on the device; by the host's clock."""
    losses: tuple[float, ...] = ()
    """Training loss of every step."""
    scales: tuple[float, ...] = ()
    """Loss scale that each step used (of the first loss, where there are several)."""
    skipped: int = 0
    """Steps with a fall of the loss scale, because a gradient was not finite."""
    steps_per_epoch: int = 0
    planned_steps: int = 0
    """More than there are losses where a time budget cut the training."""
    epoch_seconds: tuple[float, ...] = ()
    """Steps and data of each epoch, without its evaluation."""
    accuracy: tuple[float, ...] = ()
    """In per cent after each epoch, on data not trained on; empty for a task that has none."""
    test_loss: tuple[float, ...] = ()
    """Mean loss on the same data after each epoch; empty for a task that has none."""
    test_size: int | None = None
    """How many samples the accuracy is a share of."""
    chance: float | None = None
    """The accuracy of guessing, in per cent, if the task knows it."""
    untrained: float | None = None
    """The accuracy before the training, in per cent; of O0 at the first seed."""
    inference_ms: tuple[float, ...] = ()
    """Forward and loss of a training batch in evaluation mode, taken in turns with the others."""
    host_ms: float | None = None
    """On a GPU: median time until the calls of a step had returned."""
    waited: float = 0.0
    """Share of the time of the turns in which other programs had the processor."""
    peak_bytes: int | None = None
    """Of tensors, in a training of a few steps apart: weights to activations."""
    operators: tuple[Operator, ...] = ()
    """Those that take most of a step, the longest first."""

    @property
    def finished(self) -> bool:
        """Whether the training came to its end, with whatever result."""
        return self.status in ("ok", "diverged")

    @property
    def turns(self) -> tuple[tuple[float, ...], ...]:
        """Times of the steps that count, turn by turn.

        The first turn counts only where there is no other one.
        """
        ends = (*self.blocks[1:], len(self.step_ms))
        pairs = zip(self.blocks, ends, strict=False)  # none where the process died
        turns = [self.step_ms[a + 1 : b] for a, b in pairs]
        return tuple(turns[1:] if len(turns) > 1 else turns)

    @property
    def counted_ms(self) -> tuple[float, ...]:
        """The times of the steps that count."""
        return tuple(ms for turn in self.turns for ms in turn)

    @property
    def final_loss(self) -> float | None:
        """Mean training loss of the last steps, as many as an epoch has."""
        last = self.losses[-self.steps_per_epoch :] if self.steps_per_epoch else self.losses
        if not last:
            return None
        return statistics.fmean(last) if all(map(math.isfinite, last)) else sum(last)


@dataclass(frozen=True)
class Results:
    """All runs of a matrix, with what is needed to read and to repeat them."""

    environment: dict[str, Any]
    """Of `apex.commands.options.environment`: date, versions, device, threads."""
    plan: tuple[Cell, ...]
    """Every cell that was asked for, in order."""
    runs: tuple[Run, ...]
    """Those of an interrupted matrix are fewer. O0 has several of a seed where not all levels fit
    in memory together."""
    margin: float = 0.5
    """Points of accuracy that a level may lose."""
    target: float | None = None
    """The accuracy of ``--target``, in per cent."""
    budget_s: float | None = None
    """The seconds of ``--budget``."""
    seconds: float = 0.0
    """That the trainings took."""
    notes: dict[str, str] = field(default_factory=dict)
    """How the numbers were taken: a sentence each."""
    left_out: int = 0
    """Trainings that a time budget had no time for: the last seeds. They are not in the plan."""

    @property
    def busy(self) -> str | None:
        """That other programs used this machine during the trainings."""
        share = disturbed(self.runs)
        if share < BUSY:
            return None
        return f"other programs had the processor for {share:.0%} of the time of the trainings"

    @property
    def complete(self) -> bool:
        """Whether every cell was run."""
        return len({run.cell for run in self.runs}) == len(self.plan)

    @property
    def quick(self) -> bool:
        """Whether any cell was a quick one."""
        return any(cell.quick for cell in self.plan)


def disturbed(runs: Sequence[Run]) -> float:
    """Give the share of the time in which other programs had the processor; `BUSY` is too much."""
    return statistics.fmean(run.waited for run in runs) if runs else 0.0


def write(report: Results, path: Path) -> None:
    """Write the report as JSON, whole or not at all: an interruption leaves the former file.

    Numbers that JSON lacks are the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
    """
    save({"format": FORMAT, **dataclasses.asdict(report)}, path)


def read(path: Path) -> Results:
    """Read back what `write` wrote; every number is the same to the last bit.

    Raises:
        UsageError: The file cannot be read, or is not a report of this format.
    """
    try:
        found: Results = decode(path.read_bytes(), Results, FORMAT)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"{path} is not a report that apex bench writes ({error})") from None
    names = found.environment.get("device", {}), found.environment.get("versions", {})
    if not ("name" in names[0] and {"torch", "apex"} <= {*names[1]}):
        raise UsageError(f"{path} is not a report that apex bench writes (it names no machine)")
    if unknown := {cell.level for cell in found.plan} - {*LEVELS}:
        raise UsageError(f"{path} has the unknown level {unknown.pop()!r}")
    return found


def decode(content: bytes, kind: Any, file_format: str) -> Any:
    """Make a dataclass of JSON in which ``format`` is ``file_format``.

    Raises:
        ValueError: It is not such a thing.
    """
    import msgspec

    try:
        found = msgspec.json.decode(content)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(found, dict) or found.get("format") != file_format:
        raise ValueError(f"no format {file_format!r}")
    return msgspec.convert(found, kind, strict=False)  # not strict: "nan" is a float
