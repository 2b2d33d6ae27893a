"""``FusedAdagrad``: Adagrad in one launch."""

from __future__ import annotations

from typing import Any

import torch

from apex.multi_tensor_apply import list_functions
from apex.ops.updates.adagrad import Adagrad, adagrad_
from apex.optimizers._base import FusedOptimizer
from apex.optimizers._checkpoint import TORCH_ONLY
from apex.optimizers._lost import PLAIN_BY_DEFAULT


class FusedAdagrad(FusedOptimizer):
    """Adagrad in one launch for all parameters.

    Drop-in for ``torch.optim.Adagrad`` with ``lr_decay=0``. The docstring of
    :mod:`apex.ops.updates.adagrad` has the formula. Sums have the parameter's dtype, as in the
    original, or float32 with a ``storage`` other than ``"plain"``.

    See :class:`~apex.optimizers._base.FusedOptimizer` for the other arguments.

    Args:
        params: Parameters or groups.
        eps: Added to the root of the sum.
        adagrad_w_mode: Decoupled weight decay instead of an L2 penalty.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedAdagrad(model.parameters(), lr=0.01)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    slots = ("sum",)
    _algorithm, _numbers = staticmethod(adagrad_), Adagrad
    narrow_slots = ("sum",)
    adagrad_w_mode = False
    _counts_steps = False
    _refused_keys = (*FusedOptimizer._refused_keys, "lr_decay")
    # Subclasses with a step of their own call these, as in the original.
    multi_tensor_adagrad = staticmethod(list_functions.multi_tensor_adagrad)

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float | torch.Tensor = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        *,
        storage: str = PLAIN_BY_DEFAULT,
        state: str = "plain",
    ) -> None:
        self.adagrad_w_mode = bool(adagrad_w_mode)
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, defaults, set_grad_none=set_grad_none, storage=storage, state=state
        )

    def _from_torch(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group in groups:
            if group.pop("lr_decay", 0):
                raise ValueError(
                    "FusedAdagrad: the state was saved with lr_decay, which this optimizer does "
                    "not support. Lower the learning rate with torch.optim.lr_scheduler.LambdaLR."
                )
            group.pop("initial_accumulator_value", None)  # it is in the sums
        return super()._from_torch({**state_dict, "param_groups": groups})

    def torch_state_dict(self) -> dict[str, Any]:
        """Return a state that ``torch.optim.Adagrad`` can load, with every parameter's state."""
        found = super().torch_state_dict()
        for saved, group in zip(found["param_groups"], self.param_groups, strict=True):
            for number, param in zip(saved["params"], group["params"], strict=True):
                if number not in found["state"]:
                    zeros = torch.zeros_like(param, requires_grad=False)
                    found["state"][number] = self._torch_state({"sum": zeros})
        return found

    def _torch_state(self, state: dict[str, Any]) -> dict[str, Any]:
        # torch uses the step with lr_decay only; FusedAdagrad counts no steps.
        return {"step": torch.zeros((), device="cpu", dtype=torch.float32), **state}

    def _torch_group(self, group: dict[str, Any]) -> dict[str, Any]:
        if self.adagrad_w_mode and group["weight_decay"]:
            raise ValueError(
                "FusedAdagrad: torch.optim.Adagrad has no decoupled weight decay; with "
                "adagrad_w_mode=True and weight_decay it would compute something else. Save "
                "state_dict()."
            )
        return {**group, **TORCH_ONLY, "lr_decay": 0, "initial_accumulator_value": 0}
