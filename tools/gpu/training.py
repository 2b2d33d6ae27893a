"""What checks train: a small network at a level of amp, with an optimizer of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apex import amp
from apex.catalogue.optimizers import makers
from apex.optimizers import FusedAdam
from tools.gpu.checking import network, normal

FUSED = makers(lr=0.01)


def adam(params: Any) -> FusedAdam:
    """What most checks train with."""
    return FusedAdam(params, lr=0.01)


def fused(name: str) -> Callable[[Any], Any]:
    """Make an optimizer of ours by its name."""
    return FUSED[name]


class Training:
    """A training at a level; a call is a step."""

    def __init__(
        self,
        level: str,
        make: Any = adam,
        between: Any = None,
        norm: bool = True,
        **options: Any,
    ) -> None:
        made = network(norm=norm)
        self.x, self.between = normal(8, 16), between
        self.losses, self.accumulate = options.get("num_losses", 1), options.pop("accumulate", 1)
        self.model, self.optimizer = amp.initialize(
            made, make(made.parameters()), opt_level=level, verbosity=0, **options
        )

    def __call__(self) -> torch.Tensor:
        """Take a step and return the loss; ``between`` comes after the backward."""
        self.optimizer.zero_grad()
        for turn in range(self.accumulate):
            delayed = turn + 1 < self.accumulate
            for loss_id in range(self.losses):
                loss = self.model(self.x).float().square().mean()
                options = {"loss_id": loss_id, "delay_unscale": delayed}
                with amp.scale_loss(loss, self.optimizer, **options) as scaled:
                    scaled.backward()
        if self.between:
            self.between(self)
        self.optimizer.step()
        return loss.detach()


def clip(training: Training) -> None:
    """Clip between the backward and the step."""
    amp.clip_grad_norm_(training.optimizer, 1.0)
