"""One training, as far as it has come, among those that take turns in a process (`turns`)."""

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from apex._compat.private import tree_leaves
from apex.commands.bench.training import profiling
from apex.commands.bench.training.results import Cell, Run, Status
from apex.commands.bench.training.tasks.task import Task
from apex.commands.bench.training.trainer import OwnState, Trainer, mapped, out_of_memory
from apex.commands.command_line import raised

__all__ = ["AFTER", "CellTraining", "counted"]

AFTER = 12  # steps' time that evaluation and the measurements apart take, about


class CellTraining:
    """One training, as far as it has come.

    Attributes:
        cell: What is trained.
        over: Whether it has ended, for whatever reason; ``status`` and ``error`` say how.
        limit: Steps at which a budget ends it, if it does.
        planned: Steps that it would take else, once the length of an epoch is known; ``per_epoch``
            may say it before.
        infers: Whether inference can be timed: a task with a step of its own may have no loss.
    """

    def __init__(self, cell: Cell, task: Task, device: torch.device) -> None:
        self.cell, self._task, self._device = cell, task, device
        self._own = OwnState(cell, device)
        self._watch, self._inference = _Stopwatch(device), _Stopwatch(device)
        self._trainer: Trainer | None = None
        self._steps = self._train()
        self.over = False
        self.infers = task.step is None
        self.limit: int | None = None
        self.status: Status = "ok"
        self.error: str | None = None
        self.planned = self.per_epoch = self._steps_per_epoch = 0
        self._apart: dict[str, Any] = {}
        self._seconds = 0.0
        self._losses: list[torch.Tensor] = []
        self._scales: list[Any] = []
        names = ("blocks", "data_ms", "epoch_seconds", "accuracy", "test_loss")
        self._found: dict[str, list[Any]] = {name: [] for name in names}  # fields of `Run`

    @property
    def done(self) -> int:
        """Steps so far."""
        return len(self._losses)

    @property
    def trained(self) -> bool:
        """Whether it came to its end."""
        return self.status == "ok" and self.over

    @property
    def share(self) -> float:
        """How much is done, 0 to 1."""
        return 1.0 if self.over else min(1.0, self.done / self.aim) if self.aim else 0.0

    @property
    def aim(self) -> int:
        """The steps that it is to take."""
        return self.planned if self.limit is None else self.limit

    @property
    def seconds_a_step(self) -> float:
        """All that its blocks took over their steps; the first makes the optimizer's state."""
        return self._seconds / max(1, self.done - 1)

    @property
    def fastest_ms(self) -> float:
        """Its fastest step so far: something else that uses the machine only slows."""
        return min(self._watch.milliseconds()[1:], default=math.inf)

    @property
    def step_ms(self) -> float:
        """Median time of its steps so far, without the first."""
        times = self._watch.milliseconds()
        return statistics.median(times[1:] or times or [0.0])

    def block(self, size: int, budget_s: float | None) -> None:
        """Train for some steps, or to the end; for a twentieth of a budget at most."""
        self._found["blocks"].append(self.done)
        begin = time.monotonic()
        with self._guarded():
            for step in range(size):
                if next(self._steps, None) is None:
                    self.over = True
                    break
                if self.done == 1:
                    begin = time.monotonic()
                if step and budget_s is not None and time.monotonic() > begin + budget_s / 20:
                    break
        self._seconds += time.monotonic() - begin

    def infer(self) -> None:
        """Time inference once."""
        assert self._trainer is not None
        with self._guarded():
            self._inference.start()
            self._trainer.infer(self._batch)
            self._inference.stop()

    def measure_apart(self, left: float) -> None:
        """Measure what would disturb the times, at the first seed, if there are seconds left."""
        stopped = self.status == "stopped"
        if self.cell.seed == 0 and (self.trained or stopped) and left > self.seconds_a_step * AFTER:
            with self._guarded():
                self._apart = profiling.measure(
                    self.cell, self._task, self._device, self._batch, stopped=stopped
                )

    def result(self, together: tuple[str, ...], waited: float) -> Run:
        """Put together what was measured."""
        losses = torch.stack(self._losses).float().flatten().tolist() if self._losses else []
        scales = [float(scale) for scale in self._scales]
        if self.trained and not (self._finite and math.isfinite(losses[-1])):
            self.status = "diverged"
        found: dict[str, Any] = {name: tuple(values) for name, values in self._found.items()}
        found["blocks"] = tuple(block for block in found["blocks"] if block < len(losses))
        return Run(
            cell=self.cell,
            status=self.status,
            error=self.error,
            together=together,
            waited=waited,
            step_ms=tuple(self._watch.milliseconds()[: len(losses)]),
            losses=tuple(losses),
            scales=tuple(scales[: len(losses)]),
            skipped=sum(after < before for before, after in pairwise(scales)),
            steps_per_epoch=self._steps_per_epoch,
            planned_steps=self.planned,
            test_size=self._task.test_size,
            chance=self._task.chance,
            inference_ms=tuple(self._inference.milliseconds()[1:]),
            **found,
            **self._apart,
        )

    # --- inside ----------------------------------------------------------------------------------

    def _train(self) -> Generator[bool, None, None]:
        """Train; stops after every step."""
        cell, task = self.cell, self._task
        trainer = self._trainer = Trainer(cell, task, self._device)
        for epoch in range(cell.epochs):
            loader = task.loader(cell.batch, 1000 * cell.seed + epoch)
            per_epoch = _length(loader) or self._steps_per_epoch or self.per_epoch
            self.planned = per_epoch * cell.epochs
            begun, sizes = self.done, []
            for batch in self._timed(loader):
                sizes.append(_rows(batch))
                self._scales.append(trainer.precision.scale())
                self._watch.start()
                loss = trainer.step(batch)
                self._watch.stop()
                self._losses.append(loss)
                self._batch = batch
                yield True
                if self.done == self.limit:
                    break
            self._check(epoch, sizes, cut=self.done == self.limit)
            self._steps_per_epoch = self._steps_per_epoch or self.done - begun
            times = self._watch.milliseconds()[begun:], self._found["data_ms"][begun:]
            self._found["epoch_seconds"].append(sum(map(sum, times)) / 1000)
            for name in ("accuracy", "test_loss"):
                if (measure := getattr(task, name)) is not None:
                    self._found[name].append(trainer.measure(measure))
            if self.done == self.limit:
                break
        self.planned = max(self.planned, self.done)
        self._scales.append(trainer.precision.scale())
        self._finite = trainer.finite()

    def _timed(self, loader: Any) -> Iterator[Any]:
        """Give the batches on the device, and note how long each was waited for."""
        batches = iter(loader)
        while True:
            begin = time.perf_counter()
            try:
                batch = mapped(next(batches), lambda x: x.to(self._device, non_blocking=True))
            except StopIteration:
                return
            self._found["data_ms"].append(1000 * (time.perf_counter() - begin))
            yield batch

    def _check(self, epoch: int, sizes: Sequence[int], *, cut: bool) -> None:
        batch = self.cell.batch
        if not sizes:
            raise ValueError(f"the loader yielded no batch of {batch} samples")
        if sizes[0] == batch > sizes[-1]:
            raise ValueError(
                f"the loader's last batch has {sizes[-1]} rows and not {batch}; leave it out "
                "(drop_last=True of a DataLoader)"
            )
        if epoch and not cut and len(sizes) != self._steps_per_epoch:
            raise ValueError(
                f"the loader yielded {self._steps_per_epoch} batches in one epoch and {len(sizes)} "
                "in the next; every epoch must have the same number"
            )

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Surround what belongs to this training; an error ends it, and the others go on."""
        with self._own:
            try:
                yield
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
            except Exception as error:  # noqa: BLE001  one cell's failure is a result, not our end
                status: Status = "out of memory" if out_of_memory(error) else "failed"
                self.end(status, raised(error))

    def end(self, status: Status, why: str) -> None:
        """End here."""
        self.status, self.error, self.over = status, why, True
        self.free()

    def free(self, *, collect: bool = True) -> None:
        """Let go of the model, which is trained no further."""
        self._steps.close()
        self._trainer = None
        if collect:
            gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _Stopwatch:
    """Times of many steps: by the host's clock, on a GPU by CUDA events.

    There the host's clock would time launches, or hold up the GPU: host and GPU go on overlapping
    as in real training.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if cuda else None
        self._starts: list[Any] = []
        self._stops: list[Any] = []

    def start(self) -> None:
        self._starts.append(self._mark())

    def stop(self) -> None:
        self._stops.append(self._mark())

    def milliseconds(self) -> list[float]:
        """Return the time of every step so far; one that raised has none."""
        pairs = zip(self._starts, self._stops, strict=False)
        if self._stream is None:
            return [1000 * (stop - start) for start, stop in pairs]
        self._stream.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs]

    def _mark(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:
        return 0


def counted(loader: Any, seconds: float) -> int:
    """Count the batches of a loader, which need not know how many; 0 if that takes too long."""
    end, count = time.monotonic() + seconds, _length(loader)
    if count:
        return count
    for _ in loader:
        count += 1
        if time.monotonic() > end:
            return 0
    return count


def _rows(batch: Any) -> int:
    """Return the length of the first tensor, 0 if there is none that has one."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    return next((len(tensor) for tensor in tensors), 0)
