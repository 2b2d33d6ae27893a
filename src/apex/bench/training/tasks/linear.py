"""The regression of tutorial T2: ``Linear(1024, 512)``, 64 samples a step, 500 steps.

T2 draws inputs and targets apart, so nothing can be learned; here the targets are those of another
linear layer, with noise, and the learning rate is one at which the loss falls.
"""

import torch
import torch.nn.functional as F
from torch import nn

from apex.bench.training.tasks.batches import Batches
from apex.bench.training.tasks.task import Task, TaskOptions

__all__ = ["LinearRegression"]

INPUTS, OUTPUTS = 1024, 512
SAMPLES, QUICK, HELD = 64 * 500, 64 * 50, 64 * 8
NOISE = 0.1  # standard deviation; the targets have about 1


class LinearRegression(Task):
    """Mean squared error, on other samples too; there is no accuracy."""

    lr = 0.3  # the mean is over 512 outputs, so gradients are small

    def __init__(self, options: TaskOptions) -> None:
        random = torch.Generator().manual_seed(0)
        samples = QUICK if options.quick else SAMPLES
        right = torch.randn(INPUTS, OUTPUTS, generator=random) / INPUTS**0.5
        x = torch.randn(samples + HELD, INPUTS, generator=random)
        y = x @ right + NOISE * torch.randn(samples + HELD, OUTPUTS, generator=random)
        self.train, self.held = zip(
            *(part.to(options.device).split([samples, HELD]) for part in (x, y)), strict=True
        )

    def model(self) -> nn.Module:
        """Build it: 524,800 parameters."""
        return nn.Linear(INPUTS, OUTPUTS)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Take the mean over samples and outputs."""
        x, y = batch
        return F.mse_loss(model(x).float(), y)

    def loader(self, batch_size: int, seed: int) -> Batches:
        """Give inputs and targets."""
        return Batches(self.train, batch_size, seed)

    def test_loss(self, model: nn.Module) -> float:
        """Take it of the samples held out."""
        return self.loss(model, self.held).item()
