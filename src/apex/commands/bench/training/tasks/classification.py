"""What our tasks share: whole batches in a random order, and classification."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from apex.commands.bench.training.tasks.task import Task
from apex.commands.command_line import UsageError

__all__ = ["IGNORED", "Batches", "Classification", "Split", "cross_entropy"]

IGNORED = -100  # the label of what is not asked for; F.cross_entropy leaves it out


class Split(NamedTuple):
    """Rows for a model and their labels, one for a row or for each place in it."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor

    def to(self, device: torch.device) -> "Split":
        """Put all on a device."""
        return Split(*(part.to(device) for part in self))


class Batches:
    """One epoch: whole batches of the rows of some tensors, in an order drawn from a seed.

    What is left over at the end is left out, so that all steps are alike.

    Args:
        tensors: Of equally many rows, on one device.
        batch_size: Rows in a batch.
        seed: Of the order; it is drawn on the CPU, so that it is the same on every device.
        finish: Makes a batch of the picked rows of each tensor, with a generator of its own for
            what is drawn anew in each epoch; without it they are the batch.

    Raises:
        UsageError: There are fewer rows than ``batch_size``.
    """

    def __init__(
        self,
        tensors: tuple[torch.Tensor, ...],
        batch_size: int,
        seed: int,
        finish: Callable[..., Any] | None = None,
    ) -> None:
        rows = len(tensors[0])
        if batch_size > rows:
            raise UsageError(
                f"--batch {batch_size}: the task has {rows} training samples; use a smaller batch"
            )
        generator = torch.Generator("cpu").manual_seed(seed)
        order = torch.randperm(rows, generator=generator, device="cpu")
        whole = order[: rows - rows % batch_size].reshape(-1, batch_size)
        self._tensors, self._seed, self._finish = tensors, seed, finish
        self._picked = whole.to(tensors[0].device)

    def __len__(self) -> int:
        return len(self._picked)

    def __iter__(self) -> Iterator[Any]:
        random = torch.Generator("cpu").manual_seed(self._seed)
        for picked in self._picked:
            rows = tuple(tensor[picked] for tensor in self._tensors)
            yield rows if self._finish is None else self._finish(*rows, random)


class Classification(Task):
    """Cross-entropy of the classes; the accuracy is the share of test labels that are right."""

    at_once = 512
    """Test rows in a forward pass."""
    times = 1
    """What the mean over the labels is multiplied by."""
    test_size: int

    def __init__(self, data: Split, **attributes: Any) -> None:
        self.data, self.test_size = data, _asked(data.test_y)
        self.chance = _most_frequent(data.test_y)
        super().__init__(**attributes)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Take the mean over the labels, or a multiple of it."""
        return self.times * cross_entropy(model, batch)

    def loader(self, batch_size: int, seed: int) -> Iterable[Any]:
        """Give rows and labels."""
        return Batches((self.data.train_x, self.data.train_y), batch_size, seed)

    def test(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Give the test rows and their labels, in parts."""
        parts = (torch.split(part, self.at_once) for part in self.data[2:])
        return zip(*parts, strict=True)

    def accuracy(self, model: nn.Module) -> float:
        """Count what is right."""
        right = sum(int((model(x).argmax(-1) == y).sum()) for x, y in self.test())
        return 100 * right / self.test_size

    def test_loss(self, model: nn.Module) -> float:
        """Take the mean of `loss` over the labels."""
        total = sum(self.loss(model, (x, y)).item() * _asked(y) for x, y in self.test())
        return total / self.test_size


def cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Take the model's outputs in float32, and the mean over the labels."""
    x, y = batch
    outputs = model(x).float().flatten(0, -2)
    return F.cross_entropy(outputs, y.flatten(), ignore_index=IGNORED)


def _asked(labels: torch.Tensor) -> int:
    return int((labels != IGNORED).sum())


def _most_frequent(labels: torch.Tensor) -> float:
    """Give the per cent that are right if the answer is always the most frequent label."""
    asked = labels[labels != IGNORED]
    return 100 * int(asked.bincount().max()) / len(asked) if len(asked) else 0.0
