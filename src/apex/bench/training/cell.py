"""One training at one precision, measured: the loop that a user would write, and its clocks.

Every level starts from the same weights and sees the same batches in the same order. Three things
are measured in trainings of a few steps apart, because watching costs time: the memory of tensors,
the operations of a step, and on a GPU a step's host time and its replay as a CUDA graph.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from apex import amp
from apex.bench import memory
from apex.bench.intervals import percentile
from apex.bench.training import counts, energy, optimizers
from apex.bench.training.precision import precision
from apex.bench.training.resident import grown, resident
from apex.bench.training.results import Cell, Run, Status
from apex.bench.training.tasks.task import Task
from apex.bench.training.timing import Stopwatch, stopwatch

__all__ = ["few_steps", "how_measured", "mapped", "out_of_memory", "train"]

WARM_UP = 10  # steps; the first few build library plans and optimizer state
FEW_STEPS = 3  # the first makes the optimizer's state; from the second on all is in place
TIMED_APART = 20  # steps, and replays of the graph

# What torch and oneDNN say when the machine has no more memory to give.
NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "could not create a memory")


def train(
    cell: Cell,
    task: Task,
    device: torch.device,
    told: Callable[[float], None] = lambda share: None,
    *,
    alone: bool = True,
) -> Run:
    """Train once and measure; an error, a divergence or a lack of memory is part of the result.

    Args:
        cell: What to train.
        task: The task that the cell names.
        device: Where.
        told: Called after every step with the share of the training that is done, 0 to 1.
        alone: Whether this process trains nothing else, so that its own memory tells something.
    """
    trace = _Trace()
    watch = stopwatch(device)
    status: Status = "ok"
    error = None
    steps: list[float] = []
    try:
        if cell.compile:
            torch.compiler.reset()  # what an earlier cell compiled is taken, up to a limit
        with _tf32(cell.tf32):
            try:
                _train(cell, task, device, told, trace, watch, alone)
            finally:
                steps = watch.milliseconds()
            _measure_apart(cell, task, device, trace, alone)
    except Exception as caught:  # noqa: BLE001  one cell's failure is a result, not our end
        status = "out of memory" if out_of_memory(caught) else "failed"
        error = f"{type(caught).__name__}: {' '.join(str(caught).split())}"
    finally:
        amp.reset()
    if status == "ok" and not (trace.finite and math.isfinite(trace.losses[-1])):
        status = "diverged"
    return Run(
        cell=cell,
        status=status,
        error=error,
        step_ms=tuple(steps),
        data_ms=tuple(trace.data_ms),
        host_ms=trace.host_ms,
        replay_ms=trace.replay_ms,
        warm_up=min(WARM_UP, len(steps) // 2),
        losses=tuple(trace.losses),
        accuracy=tuple(trace.accuracy),
        steps_per_epoch=trace.steps_per_epoch,
        epoch_seconds=tuple(trace.epoch_seconds),
        peak_tensor_bytes=trace.peak_tensor_bytes,
        peak_process_bytes=trace.peak_process_bytes,
        skipped=sum(after < before for before, after in pairwise(trace.scales)),
        scales=tuple(trace.scales[:-1]),
        joules=trace.joules,
        flops=trace.flops,
        moved_bytes=trace.moved_bytes,
    )


@dataclass
class _Trace:
    """What a run has measured so far."""

    losses: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    data_ms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    """Before each step, and after the last one."""
    epoch_seconds: list[float] = field(default_factory=list)
    steps_per_epoch: int = 0
    finite: bool = True
    host_ms: float | None = None
    replay_ms: float | None = None
    peak_tensor_bytes: int | None = None
    peak_process_bytes: int | None = None
    joules: float | None = None
    flops: int | None = None
    moved_bytes: int | None = None


class _Trainer:
    """Models and optimizers of a task at a level, and one training step."""

    def __init__(self, cell: Cell, task: Task, device: torch.device) -> None:
        torch.manual_seed(cell.seed)
        made = task.model()
        models = [made] if isinstance(made, nn.Module) else list(made)
        models = [model.to(device).train() for model in models]
        steppers = [optimizers.make(cell.optimizer, m.parameters(), cell.lr) for m in models]
        self._task = task
        self.precision = precision(cell.level, device, task.growth_interval)
        self.models, self._optimizers = self.precision.start(models, steppers, task.losses)
        if cell.compile:
            for model in self.models:
                model.compile()

    def step(self, batch: Any) -> torch.Tensor:
        """Train on a batch and return the loss, which stays on the device."""
        if self._task.step is not None:
            return self._task.step(self.precision, self.models, self._optimizers, batch).detach()
        (model,), (optimizer,) = self.models, self._optimizers
        optimizer.zero_grad()
        with self.precision.forward():
            loss = self._task.loss(model, batch)
        self.precision.backward(loss, optimizer)
        self.precision.step(optimizer)
        return loss.detach()

    def accuracy(self) -> float | None:
        """Ask the task, in evaluation mode."""
        if self._task.accuracy is None:
            return None
        for model in self.models:
            model.eval()
        with torch.no_grad(), self.precision.forward():
            found = float(self._task.accuracy(self.models[0]))
        for model in self.models:
            model.train()
        return found

    def finite(self) -> bool:
        """Whether every weight is a number."""
        return all(bool(p.isfinite().all()) for model in self.models for p in model.parameters())


def _train(
    cell: Cell,
    task: Task,
    device: torch.device,
    told: Callable[[float], None],
    trace: _Trace,
    watch: Stopwatch,
    alone: bool,
) -> None:
    before = resident() if alone and device.type == "cpu" else None
    trainer = _Trainer(cell, task, device)
    meter = energy.Meter(device)
    for epoch in range(cell.epochs):
        begin = time.perf_counter()
        loader = task.loader(cell.batch, 1000 * cell.seed + epoch)
        expected = _length(loader) or trace.steps_per_epoch
        losses, scales, sizes = [], [], []
        with meter:
            for batch in _timed(loader, device, trace.data_ms):
                sizes.append(_rows(batch))
                scales.append(trainer.precision.scale())
                watch.start()
                losses.append(trainer.step(batch))
                watch.stop()
                done = len(losses) / expected if expected else 0.0
                told((epoch + min(done, 1.0)) / cell.epochs)
            if not losses:
                raise ValueError(f"the loader gave no batch of {cell.batch}")
            if sizes[0] == cell.batch > sizes[-1]:
                raise ValueError(
                    f"the loader's last batch has {sizes[-1]} rows and not {cell.batch}; leave it "
                    "out (drop_last=True of a DataLoader)"
                )
            if epoch and len(losses) != trace.steps_per_epoch:
                raise ValueError(
                    f"the loader gave {trace.steps_per_epoch} batches in an epoch and "
                    f"{len(losses)} in the next; they must be equally many"
                )
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        trace.epoch_seconds.append(time.perf_counter() - begin)
        trace.steps_per_epoch = len(losses)
        trace.losses += torch.stack(losses).float().flatten().tolist()
        trace.scales += map(float, scales)
        found = trainer.accuracy()
        if found is not None:
            trace.accuracy.append(found)
    trace.joules = meter.joules
    trace.scales.append(float(trainer.precision.scale()))
    trace.finite = trainer.finite()
    trace.peak_process_bytes = None if before is None else grown(before)


def _timed(loader: Any, device: torch.device, data_ms: list[float]) -> Iterator[Any]:
    """Give the batches on the device, and note how long each was waited for."""
    batches = iter(loader)
    while True:
        begin = time.perf_counter()
        try:
            batch = _to(next(batches), device)
        except StopIteration:
            return
        data_ms.append(1000 * (time.perf_counter() - begin))
        yield batch


def _measure_apart(
    cell: Cell, task: Task, device: torch.device, trace: _Trace, alone: bool
) -> None:
    """Measure what would disturb the times, in trainings of a few steps."""
    batch = _to(next(iter(task.loader(cell.batch, 0))), device)
    amp.reset()  # else it lets go of the training's tensors in the middle of the measurement
    trace.peak_tensor_bytes = memory.peak_bytes(
        lambda: few_steps(cell, task, device, batch), device
    )
    amp.reset()
    trace.flops, trace.moved_bytes = _counts(cell, task, device, batch)
    if device.type == "cuda":
        amp.reset()  # two trainings at a time may not fit
        trainer = _Trainer(cell, task, device)
        trainer.step(batch)
        trace.host_ms = _host_ms(trainer, batch, device)
        if alone:  # a capture that fails may leave the process's CUDA unusable
            trace.replay_ms = _replay_ms(trainer, batch, device)


def _counts(cell: Cell, task: Task, device: torch.device, batch: Any) -> tuple[int, int]:
    """Not compiled: what counts the operations does not see into compiled code."""
    trainer = _Trainer(dataclasses.replace(cell, compile=False), task, device)
    trainer.step(batch)  # the optimizer's state is made
    return counts.count(lambda: trainer.step(batch))


def few_steps(cell: Cell, task: Task, device: torch.device, batch: Any) -> None:
    """Train afresh, just long enough for everything that takes memory to be there."""
    trainer = _Trainer(cell, task, device)
    for _ in range(FEW_STEPS):
        trainer.step(_clone(batch))


def _host_ms(trainer: _Trainer, batch: Any, device: torch.device) -> float | None:
    times = []
    for _ in range(TIMED_APART):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        trainer.step(batch)
        times.append(1000 * (time.perf_counter() - begin))
    return percentile(times, 50)


def _replay_ms(trainer: _Trainer, batch: Any, device: torch.device) -> float | None:
    """Time a step captured as a CUDA graph; ``None`` where the step reads from the device."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            trainer.step(batch)
        watch = stopwatch(device)
        for _ in range(TIMED_APART):
            watch.start()
            graph.replay()
            watch.stop()
        return percentile(watch.milliseconds(), 50)
    except RuntimeError:
        return None


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no more memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


@contextlib.contextmanager
def _tf32(wanted: bool | None) -> Iterator[None]:
    if wanted is None:
        yield
        return
    backends: Any = torch.backends
    places: Sequence[Any] = (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
    )
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32" if wanted else "ieee"
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:
        return 0


def _rows(batch: Any) -> int:
    """Return the length of the first tensor, 0 if there is none that has one."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    return next((len(tensor) for tensor in tensors), 0)


def _to(batch: Any, device: torch.device) -> Any:
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _clone(batch: Any) -> Any:
    return mapped(batch, torch.Tensor.clone)


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change every tensor of a batch: a tensor, or tuples, lists and dicts of them."""
    return tree_map_only(torch.Tensor, change, batch)


def how_measured(device: torch.device) -> dict[str, str]:
    """Say for readers how the numbers of a `Run` were taken."""
    clock = "CUDA events" if device.type == "cuda" else "the host's clock"
    return {
        "time": "milliseconds from zero_grad to the end of step (forward, loss, backward, "
        f"optimizer) by {clock}, without the time for data; the first {WARM_UP} steps of a run do "
        f"not count (half of them in a run of fewer than {2 * WARM_UP})",
        "samples per second, total time": "of whole epochs, with data, without evaluation",
        "memory": f"peak bytes of tensors in a separate training of {FEW_STEPS} steps, above what "
        "was in use before it: weights, masters, gradients, optimizer state, activations, batch "
        f"(from {memory.source(device)}; scratch space of libraries is not in it)",
        "process memory": "largest growth of the resident set of the cell's process during its "
        "training; none where cells share a process",
        "quality": "loss is the mean over the steps of the last epoch; accuracy is on data that "
        "were not trained on, after the last epoch",
        "matrix products, bandwidth": "share of the best rate that was measured in the same run; "
        "bytes are those of every operation's inputs and outputs",
    }
