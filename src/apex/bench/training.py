"""One training of a small network on real data at one precision level, measured.

The network (two convolutions with batchnorm, one linear layer) learns the handwritten digits that
scikit-learn ships, so nothing is downloaded. Every level starts from the same weights, sees the
same batches in the same order, and runs the loop that a user would write::

    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    ...
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()

What is measured, and how: the time of a step, from ``zero_grad`` to the end of ``step``, with no
host sync of our own on a GPU; the memory, in a training of a few steps apart, because watching
memory costs time; the quality, on digits that were not trained on.

This is a small network on small images. It shows that a level trains as well as O0, and what it
costs on this machine for layers of this size; it does not predict the speed of a large model.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from apex import amp, optimizers
from apex.bench import memory
from apex.bench.results import Run, Status
from apex.bench.timing import Stopwatch, stopwatch

__all__ = [
    "LEVELS",
    "OPTIMIZERS",
    "Digits",
    "Progress",
    "described",
    "how_measured",
    "load",
    "network",
    "train",
]

LEVELS = {"O0": "fp32", "O1": "fp16", "O2": "fp16", "O3": "fp16", "O4": "bf16", "O5": "bf16"}

# The optimizers by the names of the option, with their numbers. Lower case is torch's.
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.05, "momentum": 0.9},
    "adam": {"lr": 0.005},
    "adamw": {"lr": 0.005, "weight_decay": 0.01},
    "FusedSGD": {"lr": 0.05, "momentum": 0.9},
    "FusedAdam": {"lr": 0.005, "weight_decay": 0.01},
    "FusedLAMB": {"lr": 0.005, "weight_decay": 0.01},
    "FusedNovoGrad": {"lr": 0.3},
    "FusedAdagrad": {"lr": 0.05},
}
_TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}

WARM_UP = 10  # steps; the first few build library plans and optimizer state
MEMORY_STEPS = 3  # the first makes the optimizer's state; from the second on all is in place


class Progress(Protocol):
    """Who is told how far the training is, always between two steps and never inside one."""

    def begin(self, label: str) -> None:
        """A run begins."""

    def advance(self) -> None:
        """A step is done."""

    def end(self, run: Run) -> None:
        """A run is over, well or not."""


@dataclass(frozen=True)
class Digits:
    """The data set on its device: images ``(n, 1, 8, 8)`` in [0, 1], labels ``(n,)``."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where the data are."""
        return self.train_x.device


def load(device: torch.device) -> Digits:
    """Load the 1797 digits, always split alike: two thirds to train on, a third to test on."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, labels, test_size=1 / 3, stratify=labels, random_state=0)
    train_x, test_x = (
        torch.tensor(part, dtype=torch.float32, device=device).reshape(-1, 1, 8, 8)
        for part in parts[:2]
    )
    train_y, test_y = (torch.tensor(part, dtype=torch.int64, device=device) for part in parts[2:])
    return Digits(train_x, train_y, test_x, test_y)


def network() -> nn.Sequential:
    """Build the network: 6,186 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def described(optimizer: str) -> str:
    """Say one of `OPTIMIZERS` with its numbers."""
    name = _TORCH[optimizer].__name__ if optimizer in _TORCH else optimizer
    numbers = (f"{key.replace('_', ' ')} {value}" for key, value in OPTIMIZERS[optimizer].items())
    return ", ".join([name, *numbers])


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    make: Any = _TORCH[name] if name in _TORCH else getattr(optimizers, name)
    made: torch.optim.Optimizer = make(model.parameters(), **OPTIMIZERS[name])
    return made


class _Trainer:
    """Model and optimizer at one level, and the loop's body as a user would write it."""

    def __init__(
        self, level: str, optimizer: str, seed: int, device: torch.device, *, verbosity: int
    ) -> None:
        torch.manual_seed(seed)
        model = network().to(device)
        self.model, self.optimizer = amp.initialize(
            model, _optimizer(optimizer, model), opt_level=level, verbosity=verbosity
        )
        self.criterion = nn.CrossEntropyLoss()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.criterion(self.model(x), y)
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def evaluate(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, bool]:
        """Return the accuracy in per cent and whether all outputs are finite."""
        self.model.eval()
        with torch.no_grad():
            outputs = self.model(x).float()
        self.model.train()
        right = int((outputs.argmax(1) == y).sum())
        return 100 * right / len(y), bool(outputs.isfinite().all())


@dataclass
class _Trace:
    """What a run has measured so far."""

    losses: list[float] = field(default_factory=list)
    epoch_accuracy: list[float] = field(default_factory=list)
    finite: bool = True
    peak_bytes: int | None = None
    loss_scale: float | None = None


def train(
    level: str,
    batch: int,
    seed: int,
    epochs: int,
    data: Digits,
    progress: Progress | None = None,
    *,
    optimizer: str = "sgd",
) -> Run:
    """Train once and measure; an error or a divergence is part of the result.

    Args:
        level: One of `LEVELS`.
        batch: Digits per step; what is left over at an epoch's end is not used in that epoch.
        seed: Decides the first weights and the order of the digits, alike at every level.
        epochs: How often to go through the training digits.
        data: What to train and test on, on the device to use.
        progress: Who wants to know.
        optimizer: One of `OPTIMIZERS`.
    """
    trace = _Trace()
    watch = stopwatch(data.device)
    status: Status = "ok"
    error = None
    with _counted_overflows() as overflows:
        try:
            _train(level, optimizer, batch, seed, epochs, data, trace, watch, progress)
        except Exception as caught:  # noqa: BLE001  one level's failure is a result, not our end
            status, error = "failed", f"{type(caught).__name__}: {' '.join(str(caught).split())}"
        finally:
            amp.reset()
    if status == "ok" and not (trace.finite and math.isfinite(trace.losses[-1])):
        status = "diverged"
    steps = epochs * (len(data.train_x) // batch)
    return Run(
        level=level,
        dtype=LEVELS[level],
        batch=batch,
        seed=seed,
        status=status,
        error=error,
        step_ms=tuple(watch.milliseconds()),
        warm_up=min(WARM_UP, steps // 2),
        losses=tuple(trace.losses),
        epoch_accuracy=tuple(trace.epoch_accuracy),
        steps_per_epoch=len(data.train_x) // batch,
        peak_bytes=trace.peak_bytes,
        skipped=overflows.count,
        loss_scale=trace.loss_scale,
    )


def _train(
    level: str,
    optimizer: str,
    batch: int,
    seed: int,
    epochs: int,
    data: Digits,
    trace: _Trace,
    watch: Stopwatch,
    progress: Progress | None,
) -> None:
    trainer = _Trainer(
        level, optimizer, seed, data.device, verbosity=1
    )  # 1: it tells of skipped steps
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        losses = []
        for picked in _batches(len(data.train_x), batch, order).to(data.device):
            x, y = data.train_x[picked], data.train_y[picked]
            watch.start()
            loss = trainer.step(x, y)
            watch.stop()
            losses.append(loss)
            if progress is not None:
                progress.advance()
        trace.losses += torch.stack(losses).float().tolist()  # the epoch's one look at the losses
        accuracy, trace.finite = trainer.evaluate(data.test_x, data.test_y)
        trace.epoch_accuracy.append(accuracy)
    trace.loss_scale = float(amp.state_dict()["loss_scaler0"]["loss_scale"])
    del trainer, loss, losses
    amp.reset()  # else it lets go of this training's tensors in the middle of the measurement
    trace.peak_bytes = memory.peak_bytes(
        lambda: _few_steps(level, optimizer, batch, seed, data), data.device
    )


def _few_steps(level: str, optimizer: str, batch: int, seed: int, data: Digits) -> None:
    """Train afresh, just long enough for everything that takes memory to be there."""
    trainer = _Trainer(level, optimizer, seed, data.device, verbosity=0)
    for picked in (slice(0, batch),) * MEMORY_STEPS:
        trainer.step(data.train_x[picked].clone(), data.train_y[picked].clone())


def _batches(n: int, batch: int, order: torch.Generator) -> torch.Tensor:
    """Cut a random permutation into whole batches, a row of indices for each."""
    return torch.randperm(n, generator=order)[: n - n % batch].reshape(-1, batch)


class _OverflowCounter(logging.Handler):
    """Counts the lines in which amp says that it left a step out."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "Gradient overflow" in record.getMessage()


@contextmanager
def _counted_overflows() -> Iterator[_OverflowCounter]:
    """Listen to amp's log in place of the terminal, and leave the log as it was."""
    log = logging.getLogger("apex.amp")
    level, propagate = log.level, log.propagate
    counter = _OverflowCounter()
    log.addHandler(counter)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield counter
    finally:
        log.removeHandler(counter)
        log.setLevel(level)
        log.propagate = propagate


def how_measured(data: Digits) -> dict[str, str]:
    """Say for readers how the numbers of a `Run` on these data were taken."""
    clock = "the GPU's clock" if data.device.type == "cuda" else "the host's clock"
    return {
        "time": "milliseconds from zero_grad to the end of step (forward, loss, backward, "
        f"optimizer) by {clock}; the first {WARM_UP} steps of a run are not counted (half of them "
        f"in a run of fewer than {2 * WARM_UP})",
        "memory": f"peak bytes of tensors in a separate training of {MEMORY_STEPS} steps, above "
        "what was in use before it: weights, masters, gradients, optimizer state, activations, "
        f"batch (from {memory.source(data.device)}; scratch space of libraries is not in it)",
        "quality": "loss is the mean over the steps of the last epoch, accuracy the share of the "
        f"{len(data.test_x)} test digits that are right after it; {len(data.train_x)} other "
        "digits were trained on",
    }
