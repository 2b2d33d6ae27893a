"""A small training at every level: the loss falls, weights are finite, numbers are the level's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from apex import amp
from apex.catalogue import tolerance
from apex.commands.selftest.check import Check, Measured, Setting, same
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam

__all__ = ["LEVELS", "SmallTraining", "checks"]

AREA = "training"
STEPS = 8
FEATURES, WIDTH, CLASSES, BATCH = 16, 32, 5, 32

_32, _16, _B16 = torch.float32, torch.float16, torch.bfloat16
# What a level promises: dtypes of weights, of what is stepped, of results; the first loss scale.
LEVELS = {
    "O0": (_32, _32, _32, 1.0),
    "O1": (_32, _32, _16, 2.0**16),
    "O2": (_16, _32, _16, 2.0**16),
    "O3": (_16, _16, _16, 1.0),
    "O4": (_32, _32, _B16, 1.0),
    "O5": (_B16, _32, _B16, 1.0),
}


def checks() -> Iterator[Check]:
    """The checks of this module."""
    for level in LEVELS:
        yield Check(AREA, f"training at {level}, FusedAdam", partial(_trained, level))
    for level in ("O1", "O2", "O5"):
        run = partial(_fused, level)
        yield Check(AREA, f"training at {level}, fused_step and clipping", run)


class SmallTraining:
    """A network with a layer norm, a loss and an optimizer of ours, on data that can be learnt."""

    def __init__(self, level: str, setting: Setting, **options: Any) -> None:
        torch.manual_seed(0)
        made_on: Any = {"device": "cpu", "dtype": torch.float32}  # the same on every device
        centres = 2 * torch.randn(CLASSES, FEATURES, **made_on)
        labels = torch.randint(CLASSES, (BATCH,), device="cpu")
        self.x = (centres[labels] + torch.randn(BATCH, FEATURES, **made_on)).to(setting.device)
        self.labels = labels.to(setting.device)
        self.first = nn.Linear(FEATURES, WIDTH, **made_on)
        norm, last = FusedLayerNorm(WIDTH, **made_on), nn.Linear(WIDTH, CLASSES, **made_on)
        network = nn.Sequential(self.first, norm, nn.GELU(), last)
        network.to(setting.device)
        optimizer = FusedAdam(network.parameters(), lr=0.05, weight_decay=0.01)
        made = amp.initialize(network, optimizer, opt_level=level, verbosity=0, **options)
        self.model, self.optimizer = made

    def step(self, max_norm: float = 0.0) -> torch.Tensor:
        """Take one step and return the loss, on its device."""
        self.optimizer.zero_grad()
        losses = SoftmaxCrossEntropyLoss.apply(self.model(self.x), self.labels, 0.0, -1)
        loss: torch.Tensor = losses.mean()
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()  # type: ignore[no-untyped-call]
        if max_norm:
            amp.clip_grad_norm_(self.optimizer, max_norm)
        self.optimizer.step()
        return loss.detach()


def _train(
    level: str, setting: Setting, max_norm: float = 0.0, **options: Any
) -> tuple[list[Measured], list[float], list[torch.Tensor]]:
    """Some steps: what holds before the first, the losses, the weights after the last."""
    try:
        trainer = SmallTraining(level, setting, **options)
        before = [*_numbers(trainer, *LEVELS[level])]
        losses = [float(trainer.step(max_norm)) for _ in range(STEPS)]
        return before, losses, [param.detach().clone() for param in trainer.model.parameters()]
    finally:
        amp.reset()


def _trained(level: str, setting: Setting) -> Iterator[Measured]:
    before, losses, weights = _train(level, setting)
    yield from before
    yield _falls(losses)
    not_finite = sum(int((~weight.isfinite()).sum()) for weight in weights)
    yield Measured("weights that are not finite", not_finite, 0, "elements")
    yield same("second run", weights, _train(level, setting)[2])


def _falls(losses: list[float]) -> Measured:
    return Measured("last loss / first loss", losses[-1] / losses[0], tolerance.LOSS_FALLS, "")


def _numbers(
    trainer: SmallTraining, weights: torch.dtype, stepped: torch.dtype, computes: torch.dtype,
    scale: float,
) -> Iterator[Measured]:  # fmt: skip
    """Look at dtypes and loss scale before the first step."""
    seen: list[torch.Tensor] = []
    handle = trainer.first.register_forward_hook(lambda _, __, y: seen.append(y))
    trainer.model(trainer.x)
    handle.remove()
    params = [param for group in trainer.optimizer.param_groups for param in group["params"]]
    found = {"weights": [*trainer.first.parameters()], "weights of the optimizer": params}
    found["output of a linear layer"] = seen
    for (what, tensors), expected in zip(found.items(), (weights, stepped, computes), strict=True):
        wrong = sum(x.dtype != expected for x in tensors)
        yield Measured(f"{what} not {str(expected)[6:]}", wrong, 0, "tensors")
    found_scale = float(amp.state_dict()["loss_scaler0"]["loss_scale"])
    yield Measured(f"loss scale, {scale:g} expected", abs(found_scale - scale), 0, "off")


def _fused(level: str, setting: Setting) -> Iterator[Measured]:
    """Gradients that stay scaled until the step give the losses of the default."""
    losses = [_train(level, setting, 0.5, fused_step=fused)[1] for fused in (False, True)]
    yield _falls(losses[1])
    apart = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    yield Measured("losses beside the default's", apart, tolerance.SAME_LOSSES, "of a loss")
