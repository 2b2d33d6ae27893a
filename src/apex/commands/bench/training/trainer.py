"""A model with its optimizer at one level: the training step that a user would write."""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from apex import optimizers
from apex._compat.private import tree_map_only
from apex.catalogue import optimizers as catalogue
from apex.commands.bench.training import process_state
from apex.commands.bench.training.precision import precision
from apex.commands.bench.training.results import Cell
from apex.commands.bench.training.tasks.task import Task

__all__ = ["OPTIMIZERS", "OwnState", "Trainer", "mapped", "out_of_memory"]

_TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
OPTIMIZERS: dict[str, Mapping[str, float]] = {  # by the names of the option; lower case is torch's
    "sgd": {"lr": 0.05, "momentum": 0.9},
    "adam": {"lr": 0.005},
    "adamw": {"lr": 0.005, "weight_decay": 0.01},
    **{one.title: one.training for one in catalogue.OPTIMIZERS if one.training},
}

# What torch and oneDNN say when the machine has no more memory to give.
NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "could not create a memory")


class Trainer:
    """Models and optimizers of a task at a level."""

    def __init__(self, cell: Cell, task: Task, device: torch.device) -> None:
        torch.manual_seed(cell.seed)
        made = task.model()
        models = [made] if isinstance(made, nn.Module) else list(made)
        models = [model.to(device).train() for model in models]
        kind: Any = _TORCH.get(cell.optimizer) or getattr(optimizers, cell.optimizer)
        numbers = {**OPTIMIZERS[cell.optimizer], "lr": cell.lr}
        steppers = [kind(model.parameters(), **numbers) for model in models]
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

    def infer(self, batch: Any) -> None:
        """Compute the loss of a batch in evaluation mode, without gradients."""
        with self._evaluating():
            self._task.loss(self.models[0], batch)

    def measure(self, what: Callable[[nn.Module], float]) -> float:
        """Ask the task for its accuracy or test loss."""
        with self._evaluating():
            return float(what(self.models[0]))

    def finite(self) -> bool:
        """Whether every weight is a number."""
        return all(bool(p.isfinite().all()) for model in self.models for p in model.parameters())

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        for model in self.models:
            model.eval()
        with torch.no_grad(), self.precision.forward():
            yield
        for model in self.models:
            model.train()


class OwnState:
    """What a training changes in its process, so that others that take turns do not see it.

    Random numbers, amp's casts and kernels, and TF32: inside of a ``with`` block they are as this
    training left them. At first the random numbers are those of its seed, and nothing is cast. So
    its losses are, to the last bit, those of the same training alone in a process, and O0 and
    ``native-*`` run without amp's kernels.
    """

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self._device = device
        self._fp32 = None if cell.tf32 is None else ("tf32" if cell.tf32 else "ieee",) * 3
        self._amp = process_state.NOTHING
        torch.manual_seed(cell.seed)
        random.seed(cell.seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(cell.seed)
        self._random = self._random_state()

    def __enter__(self) -> None:
        cpu, cuda, python, numpys = self._random
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._device)
        random.setstate(python)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(numpys)
        process_state.put_back(self._amp)
        self._before = _set_precision(self._fp32)

    def __exit__(self, *error: object) -> None:
        _set_precision(self._before)
        self._amp = process_state.take_off()
        self._random = self._random_state()

    def _random_state(self) -> tuple[Any, Any, Any, Any]:
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        numpy = sys.modules.get("numpy")
        numpys = None if numpy is None else numpy.random.get_state()
        return torch.get_rng_state(), cuda, random.getstate(), numpys


def _set_precision(wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Choose how a GPU multiplies float32 in products, convolutions, recurrent layers.

    Returns:
        What it was.
    """
    backends: Any = torch.backends
    places = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
    before = tuple(str(place.fp32_precision) for place in places)
    for place, kind in zip(places, wanted or before, strict=True):
        place.fp32_precision = kind
    return before


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no more memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change every tensor of a batch: a tensor, or tuples, lists and dicts of them."""
    return tree_map_only(torch.Tensor, change, batch)
