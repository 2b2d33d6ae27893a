"""The regression of tutorial T2: ``Linear(1024, 512)``, 64 samples a step, 500 steps.

T2 draws inputs and targets apart, so nothing can be learned; here the targets are those of another
linear layer, with noise, and the learning rate is one at which the loss falls.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex.commands.bench.training.tasks.classification import Batches
from apex.commands.bench.training.tasks.task import Task, TaskOptions

__all__ = ["regression"]

INPUTS, OUTPUTS = 1024, 512
SAMPLES, QUICK, HELD = 64 * 500, 64 * 50, 64 * 8
NOISE = 0.1  # standard deviation; the targets have about 1


def regression(options: TaskOptions) -> Task:
    """Mean squared error, on other samples too; there is no accuracy."""
    random = torch.Generator("cpu").manual_seed(0)
    made: Any = {"device": "cpu", "dtype": torch.float32}
    samples = QUICK if options.quick else SAMPLES
    right = torch.randn(INPUTS, OUTPUTS, generator=random, **made) / INPUTS**0.5
    x = torch.randn(samples + HELD, INPUTS, generator=random, **made)
    y = x @ right + NOISE * torch.randn(samples + HELD, OUTPUTS, generator=random, **made)
    train, held = zip(
        *(part.to(options.device).split([samples, HELD]) for part in (x, y)), strict=True
    )
    return Task(
        model=partial(nn.Linear, INPUTS, OUTPUTS),
        loss=_loss,
        loader=partial(Batches, train),
        test_loss=lambda model: _loss(model, held).item(),
        lr=0.3,  # the mean is over 512 outputs, so gradients are small
    )


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.mse_loss(model(x).float(), y)
