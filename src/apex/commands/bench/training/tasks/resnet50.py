"""ResNet-50 at 224x224, as published tables have it, on random images.

Each epoch has one batch of random images with random classes and trains on it again and again;
there is no accuracy.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from apex.commands.bench.training.tasks.classification import cross_entropy
from apex.commands.bench.training.tasks.networks import ResNet
from apex.commands.bench.training.tasks.task import Task, TaskOptions

__all__ = ["resnet50"]

SIZE, CLASSES = 224, 1000
STEPS, QUICK = 50, 5  # in an epoch


def resnet50(options: TaskOptions) -> Task:
    """1,000 classes and 25,557,032 parameters."""

    def loader(batch_size: int, seed: int) -> Iterable[Any]:
        random, shape = torch.Generator("cpu").manual_seed(seed), (batch_size, 3, SIZE, SIZE)
        images = torch.randn(shape, generator=random, device="cpu", dtype=torch.float32)
        classes = torch.randint(CLASSES, (batch_size,), generator=random, device="cpu")
        batch = images.to(options.device), classes.to(options.device)
        return [batch] * (QUICK if options.quick else STEPS)

    model = partial(ResNet, (3, 4, 6, 3), bottleneck=True, classes=CLASSES)
    return Task(model=model, loss=cross_entropy, loader=loader, lr=0.02)
