"""What `apex bench` measured, as plain data, and the file that it is kept in.

A `Cell` is one training, named by everything that decides its numbers but the machine; a `Run` is
what was measured of it; a `Report` is all runs of a matrix with the machine they ran on. Nothing
here trains, computes statistics or draws.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from apex.bench.output.files import save

__all__ = [
    "FORMAT",
    "Cell",
    "Report",
    "Run",
    "read",
    "run_from",
    "write",
]

FORMAT = "apex bench 2"  # its JSON Schema: schema.json beside this file

T = TypeVar("T")
Status = Literal["ok", "diverged", "out of memory", "failed"]


@dataclass(frozen=True)
class Cell:
    """One training of the matrix."""

    task: str
    level: str
    """One of `apex.bench.training.precision.LEVELS`."""
    tf32: bool | None
    """Whether float32 products may use TF32; ``None`` on a device that has none."""
    batch: int
    seed: int
    optimizer: str
    lr: float
    epochs: int
    compile: bool
    quick: bool
    """Less data, in a process that cells of the same level share."""

    @property
    def label(self) -> str:
        """The level as tables and plots name it, with TF32 where that is a choice."""
        return self.level if self.tf32 is None else f"{self.level} TF32 {_on_off(self.tf32)}"


@dataclass(frozen=True)
class Run:
    """What was measured of a cell.

    A run that ``failed`` or was ``out of memory`` keeps what it had measured until then (losses and
    scales: of whole epochs); one that
    ``diverged`` ended with a loss or weights that are not finite.
    """

    cell: Cell
    status: Status
    error: str | None = None
    step_ms: tuple[float, ...] = ()
    """Every step in order, from zero_grad to the end of step; the first ``warm_up`` do not count.
    By the host's clock on a CPU, by CUDA events on a GPU."""
    data_ms: tuple[float, ...] = ()
    """Before each step, until its batch was on the device; by the host's clock."""
    host_ms: float | None = None
    """On a GPU: median time until the calls of a step had returned."""
    replay_ms: float | None = None
    """On a GPU: median time of a step replayed as a CUDA graph, which has no host time in it."""
    warm_up: int = 0
    losses: tuple[float, ...] = ()
    """Training loss of every step."""
    accuracy: tuple[float, ...] = ()
    """In per cent after each epoch, on data not trained on; empty for a task that has none."""
    steps_per_epoch: int = 0
    epoch_seconds: tuple[float, ...] = ()
    """Of each epoch with its data and without its evaluation."""
    peak_tensor_bytes: int | None = None
    """Of tensors, in a training of a few steps apart: weights to activations."""
    peak_process_bytes: int | None = None
    """On a CPU: how much the resident set of the cell's own process grew in its training at most;
    ``None`` where cells share a process."""
    skipped: int = 0
    """Steps with a fall of the loss scale, because a gradient was not finite (of the first loss,
    where there are several: what others left out is not in it)."""
    scales: tuple[float, ...] = ()
    """Loss scale that each step used (of the first loss, where there are several)."""
    joules: float | None = None
    """Energy of all epochs, where the machine lets it be read."""
    flops: int | None = None
    """Of the matrix products and convolutions of one step, forward and backward."""
    moved_bytes: int | None = None
    """Of one step: the inputs and outputs of every operation, each read or written once."""

    @property
    def counted_ms(self) -> tuple[float, ...]:
        """The step times without the warm-up."""
        return self.step_ms[self.warm_up :]

    @property
    def finished(self) -> bool:
        """Whether the training came to its end, with whatever result."""
        return self.status in ("ok", "diverged")

    @property
    def epoch_losses(self) -> tuple[float, ...]:
        """Mean training loss of each finished epoch."""
        n = self.steps_per_epoch
        epochs = range(len(self.losses) // n) if n else ()
        return tuple(_mean(self.losses[i * n : (i + 1) * n]) for i in epochs)


@dataclass(frozen=True)
class Report:
    """All runs of a matrix, with what is needed to read and to repeat them."""

    environment: dict[str, Any]
    """Of `apex.bench.options.environment`: date, versions, device, threads."""
    plan: tuple[Cell, ...]
    """Every cell that was asked for, in order."""
    runs: tuple[Run, ...]
    """At most one for each cell of the plan; those of an interrupted matrix are fewer."""
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    """How the numbers were taken: a sentence for each of ``time``, ``memory``, ``quality`` ..."""
    largest: tuple[dict[str, Any], ...] = ()
    """Of ``--batch max``: ``task``, ``level`` (a label), ``batch`` (the largest that fitted),
    ``limit_bytes``, ``error`` (why the search ended early, or ``None``)."""
    ceilings: dict[str, float] = dataclasses.field(default_factory=dict)
    """Measured in the same run: ``flops float32`` ... (per second) and ``bytes`` (per second)."""

    @property
    def complete(self) -> bool:
        """Whether every cell was run."""
        return len(self.runs) == len(self.plan)

    @property
    def quick(self) -> bool:
        """Whether any cell was a quick one."""
        return any(cell.quick for cell in self.plan)


def write(report: Report, path: Path) -> None:
    """Write the report as JSON, whole or not at all: an interruption leaves the former file.

    Numbers that JSON lacks are the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
    """
    save({"format": FORMAT, **dataclasses.asdict(report)}, path)


def read(path: Path) -> Report:
    """Read back what `write` wrote; every number is the same to the last bit.

    Raises:
        ValueError: The file is not a report of this format; the message is one line.
        OSError: It cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a report that apex bench writes (format {FORMAT!r})")
    try:
        return _typed(Report, {key: content[key] for key in content if key != "format"})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is a damaged report of apex bench ({error})") from error


def run_from(fields: dict[str, Any]) -> Run:
    """Make a run of what `dataclasses.asdict` and JSON made of it.

    Raises:
        TypeError, ValueError: It is not such a thing; the message is one line.
    """
    return _typed(Run, fields)


def _typed(kind: type[T], fields: Any) -> T:
    """Make a dataclass of a JSON object that has exactly its fields, each of its type."""
    hints = get_type_hints(kind)
    if not isinstance(fields, dict) or fields.keys() != hints.keys():
        raise TypeError(f"a {kind.__name__.lower()} has the fields {', '.join(hints)}")
    return kind(**{name: _value(name, hints[name], fields[name]) for name in hints})


def _value(name: str, hint: Any, value: Any) -> Any:
    """Check one value and undo `jsonable`; an integer will do for a float."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is UnionType:  # X | None
        return None if value is None else _value(name, inner[0], value)
    if kind is tuple and isinstance(value, list):
        return tuple(_value(name, inner[0], item) for item in value)
    if kind is dict and isinstance(value, dict):
        return {key: _value(name, inner[1], item) for key, item in value.items()}
    if kind in (Cell, Run):
        return _typed(kind, value)
    if kind is float and (type(value) in (int, float) or value in ("nan", "inf", "-inf")):
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"{name} is too large a number") from error
    right = value in inner if kind is Literal else kind is Any or type(value) is kind
    if not right:
        raise TypeError(f"{name} is {str(value)[:40]!r}")
    return value


def _on_off(flag: bool) -> str:
    return "on" if flag else "off"


def _mean(values: Sequence[float]) -> float:
    """Average, also inf and -inf, of which `statistics.fmean` raises ValueError."""
    finite = all(map(math.isfinite, values))
    return statistics.fmean(values) if finite else sum(values) / len(values)
