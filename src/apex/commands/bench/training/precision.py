"""The precisions that `apex bench` compares, each as a user's loop would have it.

O0 to O5 are `apex.amp`; ``native-fp16`` and ``native-bf16`` are what torch itself offers,
`torch.autocast` with a `GradScaler`; ``FP16`` is the way of 2018 that tutorial T2 measured,
`network_to_half` with `FP16_Optimizer(static_loss_scale=128)`. A training step is::

    with precision.forward():
        loss = task.loss(model, batch)
    precision.backward(loss, optimizer)
    precision.step(optimizer)
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from apex import amp, fp16_utils

__all__ = ["ALIASES", "LEVELS", "Precision", "precision"]

LEVELS = {
    "O0": "fp32", "O1": "fp16", "O2": "fp16", "O3": "fp16", "O4": "bf16", "O5": "bf16",
    "native-fp16": "fp16", "native-bf16": "bf16", "FP16": "fp16",
}  # fmt: skip
ALIASES = {"FP32": "O0", "amp": "O1"}  # the names of tutorial T2
STATIC_SCALE = 128.0  # of T2's FP16

Optimizers = Sequence[torch.optim.Optimizer]


class Precision:
    """One way to train, for one or more models: here plain float32, elsewhere what differs."""

    def start(
        self, models: Sequence[nn.Module], optimizers: Optimizers, losses: int
    ) -> tuple[Sequence[nn.Module], Optimizers]:
        """Take models in float32 and their optimizers; return what the loop uses."""
        return models, optimizers

    def forward(self) -> AbstractContextManager[Any]:
        """Surround the forward and the loss, in training and in evaluation."""
        return nullcontext()

    def backward(
        self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, loss_id: int = 0
    ) -> None:
        """Compute gradients of the scaled loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale and step, or skip."""
        optimizer.step()

    def scale(self) -> float | torch.Tensor:
        """Return the loss scale that the next step uses, of the first loss, without waiting."""
        return 1.0


class _Amp(Precision):
    def __init__(self, level: str, growth_interval: int) -> None:
        self._level = level
        self._scaler: Any = None
        self._growth_interval = growth_interval

    def start(
        self, models: Sequence[nn.Module], optimizers: Optimizers, losses: int
    ) -> tuple[Sequence[nn.Module], Optimizers]:
        made: Any = amp.initialize(
            list(models),
            list(optimizers),
            opt_level=self._level,
            num_losses=losses,
            verbosity=0,
            growth_interval=self._growth_interval,
        )
        self._scaler = made[1][0]._amp_stash.training.loss_scalers[0]
        return cast("tuple[Sequence[nn.Module], Optimizers]", made)

    def backward(
        self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, loss_id: int = 0
    ) -> None:
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            super().backward(scaled, optimizer)

    def scale(self) -> float | torch.Tensor:
        scaler = self._scaler  # amp.state_dict() would wait for a GPU
        scale = scaler.scale_on(scaler.numbers.device)
        return scale.clone() if isinstance(scale, torch.Tensor) else scale


class _Native(Precision):
    """torch.autocast; float16 needs the scaler, and with bfloat16 it is off."""

    def __init__(self, dtype: torch.dtype, device: torch.device, growth_interval: int) -> None:
        self._dtype = dtype
        self._device = device.type
        self._scaler = torch.amp.GradScaler(
            self._device, growth_interval=growth_interval, enabled=dtype == torch.float16
        )

    def forward(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device, self._dtype)

    def backward(
        self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, loss_id: int = 0
    ) -> None:
        super().backward(self._scaler.scale(loss), optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler.step(optimizer)
        self._scaler.update()

    def scale(self) -> float | torch.Tensor:
        scale = getattr(self._scaler, "_scale", None)  # what get_scale() reads, waiting for a GPU
        return self._scaler.get_scale() if scale is None else scale.clone()


class _Legacy(Precision):
    """T2's FP16: a 16-bit network, float32 masters, a static scale that skips no step."""

    def start(
        self, models: Sequence[nn.Module], optimizers: Optimizers, losses: int
    ) -> tuple[Sequence[nn.Module], Optimizers]:
        halves = [fp16_utils.network_to_half(model) for model in models]
        wrapped = [
            fp16_utils.FP16_Optimizer(optimizer, static_loss_scale=STATIC_SCALE, verbose=False)
            for optimizer in optimizers
        ]
        return halves, cast(Optimizers, wrapped)

    def backward(
        self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, loss_id: int = 0
    ) -> None:
        cast(fp16_utils.FP16_Optimizer, optimizer).backward(loss.float())

    def scale(self) -> float:
        return STATIC_SCALE


def precision(level: str, device: torch.device, growth_interval: int = 2000) -> Precision:
    """Make the precision of one of `LEVELS` for a training on ``device``.

    A loss scale that moves is doubled after ``growth_interval`` steps without an overflow.
    """
    if level.startswith("native-"):
        dtype = torch.float16 if level == "native-fp16" else torch.bfloat16
        return _Native(dtype, device, growth_interval)
    return _Legacy() if level == "FP16" else _Amp(level, growth_interval)
