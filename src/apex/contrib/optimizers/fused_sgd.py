"""``FusedSGD`` with the ``step`` of 2019."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import required

from apex.contrib.optimizers._old_step import OldStep
from apex.optimizers.fused_sgd import FusedSGD as _FusedSGD


class FusedSGD(OldStep, _FusedSGD):
    """:class:`apex.optimizers.FusedSGD` whose ``step`` takes gradients, outputs and a scale."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = required,  # type: ignore[assignment]
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
    ) -> None:
        _FusedSGD.__init__(
            self, params, lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum,
            materialize_master_grads,
        )  # fmt: skip
