"""``FusedSGD`` with the ``step`` of 2019."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import required

from apex.contrib.optimizers._old_step import OldStep
from apex.optimizers.fused_sgd import FusedSGD as _FusedSGD


class FusedSGD(OldStep, _FusedSGD):
    """:class:`apex.optimizers.FusedSGD` whose ``step`` takes gradients, outputs and a scale.

    Args:
        params: Parameters, named parameters or groups.
        lr: Learning rate, to be given here or in each group.
        momentum: Decay of the momentum buffer.
        dampening: What is left out of each gradient that enters the buffer.
        weight_decay: L2 penalty.
        nesterov: Nesterov's momentum.
        wd_after_momentum: Add the penalty behind the momentum.
        materialize_master_grads: Read by amp.
    """

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
            self,
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            wd_after_momentum=wd_after_momentum,
            materialize_master_grads=materialize_master_grads,
        )
