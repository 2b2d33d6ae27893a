"""Classification of images that are small enough to be on the device as a whole."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from apex.bench.training.tasks.batches import Batches
from apex.bench.training.tasks.task import Task

__all__ = ["Classification", "Split"]

AT_ONCE = 512  # images in a forward pass of the evaluation


class Split(NamedTuple):
    """Images ``(n, channels, height, width)`` in float32 and their classes ``(n)``."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


class Classification(Task):
    """Cross-entropy of the classes; the accuracy is the share of test images that are right."""

    unit = "images"

    def __init__(self, data: Split) -> None:
        self.data = data

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Take the model's outputs in float32."""
        x, y = batch
        return F.cross_entropy(model(x).float(), y)

    def loader(self, batch_size: int, seed: int) -> Batches:
        """Give images and classes."""
        return Batches((self.data.train_x, self.data.train_y), batch_size, seed)

    def accuracy(self, model: nn.Module) -> float:
        """Classify the test images."""
        guesses = [model(x).argmax(1) for x in torch.split(self.data.test_x, AT_ONCE)]
        return 100 * (torch.cat(guesses) == self.data.test_y).double().mean().item()
