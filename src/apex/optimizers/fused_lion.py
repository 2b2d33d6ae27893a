"""``FusedLion``: Lion in one launch."""

from __future__ import annotations

from typing import Any

import torch

from apex.ops.updates.lion import Lion, lion_
from apex.optimizers._base import FusedOptimizer
from apex.optimizers._lost import PLAIN_BY_DEFAULT


class FusedLion(FusedOptimizer):
    """Lion: each weight moves by ``lr``, in the direction of an average's sign.

    See :mod:`apex.ops.updates.lion` for the formula. Weight decay is decoupled. The average is
    float32, float64 for float64 parameters.

    The arguments that are not below are those of :class:`~apex.optimizers._base.FusedOptimizer`.

    Args:
        params: Parameters or groups.
        lr: Learning rate, 3 to 10 times smaller than AdamW's; a tensor is read on its device.
        betas: Decays of the average in the update's sign, and of the average that is kept.
        weight_decay: Weight decay, 3 to 10 times AdamW's; a tensor is read on its device.

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
