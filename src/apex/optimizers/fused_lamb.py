"""``FusedLAMB``: LAMB in two launches, with the norms on the device."""

from __future__ import annotations

from typing import Any

import torch

from apex.multi_tensor_apply import list_functions
from apex.ops.lists.stages import Kind
from apex.ops.updates.lamb import SQUARES, Lamb, lamb_stages
from apex.optimizers._base import FusedOptimizer
from apex.optimizers._lost import PLAIN_BY_DEFAULT


class FusedLAMB(FusedOptimizer):
    """LAMB: Adam's step, scaled for each tensor by the ratio of weight to step.

    The docstring of :mod:`apex.ops.updates.lamb` has the formula. A step first clips the gradients
    of all groups together to the norm ``max_grad_norm``. Norms stay on the device, so the host does
    not wait for them.

    Three things are kept from the original:

    * ``step()`` overwrites each ``grad`` with the update before the learning rate, so clear the
      gradients. Gradients that share memory, such as one tensor for two weights, and inference
      tensors stay unchanged.
    * ``max_grad_norm`` is an argument of the constructor; a group's is ignored.
    * Moments of float16 parameters are float16. Moments of bfloat16 parameters, which the original
      did not support, are float32.

    See :class:`~apex.optimizers._base.FusedOptimizer` for the other arguments.

    Args:
        params: Parameters or groups.
        weight_decay: Weight decay. Where it is 0, steps are not scaled by the ratio.
        adam_w_mode: Decoupled weight decay instead of an L2 penalty.
        use_nvlamb: Whether to scale steps without weight decay too.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FusedLAMB(model.parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    slots = ("exp_avg", "exp_avg_sq")
    _algorithm, _numbers = staticmethod(lamb_stages), Lamb
    _writes_grads = True
    adam_w_mode, use_nvlamb = 1, False
    narrow_slots = ("exp_avg", "exp_avg_sq")
    # Subclasses with a step of their own call these, as in the original.
    multi_tensor_l2norm = staticmethod(list_functions.multi_tensor_l2norm)
    multi_tensor_lamb = staticmethod(list_functions.multi_tensor_lamb)

    def __init__(  # noqa: PLR0913
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float | torch.Tensor = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        *,
        storage: str = PLAIN_BY_DEFAULT,
        state: str = "plain",
    ) -> None:
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(
            params, defaults, set_grad_none=set_grad_none, storage=storage, amsgrad=amsgrad,
            state=state,
        )  # fmt: skip

    def _slot_dtype(self, slot: str, param: torch.Tensor) -> torch.dtype:
        if param.dtype == torch.bfloat16:
            return torch.float32
        return super()._slot_dtype(slot, param)

    def _largest_norm(self) -> float:
        return float(self.defaults["max_grad_norm"])

    def _kinds(self) -> set[Kind]:
        return {SQUARES}
