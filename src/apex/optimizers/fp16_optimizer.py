"""``FP16_Optimizer`` of the programs that trained BERT in 2019.

It was another class than that of :mod:`apex.fp16_utils`; now it is that class with other defaults:
gradients stay scaled on the model until ``step``, a static scale skips a step after an overflow
too, and ``zero_grad`` frees gradients.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from apex.fp16_utils import checkpoint
from apex.fp16_utils import fp16_optimizer as _base

__all__ = ["FP16_Optimizer", "fused_norm"]


def fused_norm(input: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm of a tensor, computed in float32: a 0-dim float32 tensor."""
    norm: torch.Tensor = torch.linalg.vector_norm(input, dtype=torch.float32)
    return norm


def _of_scaler(name: str) -> property:
    return property(lambda optimizer: getattr(optimizer.loss_scaler, name))


class FP16_Optimizer(_base.FP16_Optimizer):
    """Step float32 masters of 16-bit parameters, with a scaled loss.

    To clip gradients, pass ``max_grad_norm`` to the wrapped optimizer: ``FusedAdam(...,
    max_grad_norm=1.0)``. ``dynamic_loss_args`` may contain ``init_scale`` (2**16 by default),
    ``scale_window`` (1000), ``min_loss_scale`` (1) and ``max_loss_scale`` (``None``). Everything
    else works as in :class:`apex.fp16_utils.FP16_Optimizer`.

    Attributes:
        cur_scale: The loss scale. You can set it.
        cur_iter: Number of ``step`` calls, including skipped steps.
        scale_factor: Growth factor, with a dynamic scale only, like ``scale_window`` and
            ``last_overflow_iter``.
        fp32_groups: For each group, the tensors that the wrapped optimizer steps: masters, and
            parameters without masters.

    Example:
        >>> from apex.optimizers import FusedAdam
        >>> model = torch.nn.Linear(4, 2).half()
        >>> optimizer = FusedAdam(model.parameters(), bias_correction=False, max_grad_norm=1.0)
        >>> optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True, verbose=False)
        >>> optimizer.backward(model(torch.ones(1, 4, dtype=torch.float16)).float().sum())
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    _dynamic_defaults: ClassVar[dict[str, Any]] = {"init_scale": 2.0**16}
    _always_checks = True
    cur_iter = 0

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = False, retain_graph: bool = False
    ) -> None:
        """Backpropagate ``loss`` times the loss scale; gradients stay scaled until ``step``."""
        super().backward(loss, update_master_grads, retain_graph)

    def step(self, closure: Any = None) -> Any:
        """Step the masters and round them into the model. After an overflow, skip the step."""
        self.cur_iter += 1
        return super().step(closure)

    def zero_grad(  # type: ignore[override]  # the original's signature
        self, set_grads_to_None: bool = True, *, set_to_none: bool | None = None
    ) -> None:
        """Clear the gradients of the masters and of the model's parameters."""
        super().zero_grad(set_grads_to_None, set_to_none=set_to_none)

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.loss_scale = value

    # A static scale has none of these. To write one would change nothing, and is refused.
    scale_factor, scale_window, last_overflow_iter = map(
        _of_scaler, ("scale_factor", "scale_window", "last_overflow_iter")
    )

    @property
    def fp32_groups(self) -> list[list[torch.Tensor]]:
        """For each group, the tensors that the wrapped optimizer steps."""
        return [list(group["params"]) for group in self.param_groups]

    def __getattr__(self, name: str) -> Any:
        if name == "fp32_groups_flat":  # a copy would lose what is written into it
            raise AttributeError(
                "FP16_Optimizer has no fp32_groups_flat: it does not join the masters of a group "
                "into one tensor. Use fp32_groups, a list of masters for each group."
            )
        return super().__getattr__(name)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a bit-exact resume needs besides the model's ``state_dict``."""
        return {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_iter": self.cur_iter,
            **checkpoint.scaler_to_dict(self.loss_scaler),  # a dynamic one has its own cur_iter
            "optimizer_state_dict": self.optim.state_dict(),
            "fp32_groups": checkpoint.detached(self.fp32_groups),
        }

    def _read(self, state_dict: dict[str, Any]) -> checkpoint.Saved:
        return checkpoint.read_of_bert(state_dict, self)
