"""Classification: of images, of the next character of a text, of its masked words."""

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from apex.bench.training.tasks.batches import Batches
from apex.bench.training.tasks.task import Task

__all__ = ["IGNORED", "Classification", "Split"]

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


class Classification(Task):
    """Cross-entropy of the classes; the accuracy is the share of test labels that are right."""

    at_once: ClassVar[int] = 512
    """Test rows in a forward pass."""
    test_size: int

    def __init__(self, data: Split) -> None:
        self.data = data
        self.test_size = _asked(data.test_y)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Take the model's outputs in float32, and the mean over the labels."""
        x, y = batch
        return F.cross_entropy(model(x).float().flatten(0, -2), y.flatten(), ignore_index=IGNORED)

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


def _asked(labels: torch.Tensor) -> int:
    return int((labels != IGNORED).sum())
