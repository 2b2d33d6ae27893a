"""``FusedLion``: Lion in one launch."""

from __future__ import annotations

from typing import Any

import torch

from apex.ops.updates.lion import Lion, lion_
from apex.optimizers._base import FusedOptimizer
from apex.optimizers._lost import PLAIN_BY_DEFAULT


class FusedLion(FusedOptimizer):
    """Lion: each weight moves by ``lr``, against the sign of an average of its gradients.

    The docstring of :mod:`apex.ops.updates.lion` has the formula. Weight decay is decoupled. The
    average is float32, or float64 for float64 parameters.

    See :class:`~apex.optimizers._base.FusedOptimizer` for the other arguments.

    Args:
        params: Parameters or groups.
        lr: Learning rate. Use a 3 to 10 times smaller one than for AdamW. A tensor is read on its
            device.
        betas: Decays of the average whose sign is used, and of the average that is kept.
        weight_decay: Weight decay. Use a 3 to 10 times larger one than for AdamW. A tensor is read
            on its device.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedLion(model.parameters(), lr=1e-4, weight_decay=0.1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    slots = ("exp_avg",)
    _algorithm, _numbers = staticmethod(lion_), Lion
    _counts_steps = False

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float | torch.Tensor = 0.0,
        set_grad_none: bool = True,
        *,
        storage: str = PLAIN_BY_DEFAULT,
        state: str = "plain",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(
            params, defaults, set_grad_none=set_grad_none, storage=storage, state=state
        )
