"""``FP16_Optimizer`` of the programs that trained BERT in 2019.

It was another class than that of :mod:`apex.fp16_utils`, under the same name; now it is that class
with other defaults: gradients stay scaled on the model until ``step``, a static scale skips a step
after an overflow too, and ``zero_grad`` frees gradients.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from apex.fp16_utils import checkpoint
from apex.fp16_utils import fp16_optimizer as _base
from apex.fp16_utils.loss_scaler import DynamicLossScaler
from apex.fp16_utils.masters import load

__all__ = ["FP16_Optimizer", "fused_norm"]


def fused_norm(input: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm of a tensor, computed in float32: a 0-dim float32 tensor."""
    norm: torch.Tensor = torch.linalg.vector_norm(input, dtype=torch.float32)
    return norm


class FP16_Optimizer(_base.FP16_Optimizer):
    """Step float32 masters of 16-bit parameters, with a scaled loss.

    Gradients are clipped by the wrapped optimizer: ``FusedAdam(..., max_grad_norm=1.0)``. Anything
    that is not said here is as in :class:`apex.fp16_utils.FP16_Optimizer`.

    Args:
        init_optimizer: The optimizer to wrap, of :mod:`apex.optimizers`,
            :mod:`apex.contrib.optimizers` or torch.
        static_loss_scale: The loss scale; a step with inf or nan in its gradients is skipped.
        dynamic_loss_scale: Find the scale while training.
        dynamic_loss_args: Options of the dynamic scale; ``init_scale`` is 2**16 here,
            ``scale_window`` 1000, ``min_loss_scale`` 1, ``max_loss_scale`` ``None``.
        verbose: Say how many parameters have masters, and each overflow.

    Attributes:
        cur_scale: The loss scale; may be written.
        cur_iter: How many steps were called, skipped ones too.

    Example:
        >>> from apex.optimizers import FusedAdam
        >>> model = torch.nn.Linear(4, 2).half()
        >>> optimizer = FusedAdam(model.parameters(), bias_correction=False, max_grad_norm=1.0)
        >>> optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True, verbose=False)
        >>> optimizer.backward(model(torch.ones(1, 4, dtype=torch.float16)).float().sum())
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    _dynamic_defaults: ClassVar[dict[str, Any]] = {
        "init_scale": 2.0**16,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_loss_scale": 1.0,
        "max_loss_scale": None,
    }
    _always_checks = True
    cur_iter = 0

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = False, retain_graph: bool = False
    ) -> None:
        """Backpropagate ``loss`` times the loss scale; gradients stay scaled until ``step``.

        Args:
            loss: A tensor with one element.
            update_master_grads: Bring the gradients to the masters at once.
            retain_graph: Keep the graph for another backward pass.
        """
        super().backward(loss, update_master_grads, retain_graph)

    def step(self, closure: Any = None) -> Any:
        """Step the masters and round them into the model; does nothing after an overflow."""
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

    @property
    def scale_factor(self) -> float:
        """What a dynamic scale grows by and is divided by."""
        return self._dynamic.scale_factor

    @property
    def scale_window(self) -> int:
        """Clean steps after which a dynamic scale grows."""
        return self._dynamic.scale_window

    @property
    def last_overflow_iter(self) -> int:
        """The iteration of the last overflow with a dynamic scale, -1 before."""
        return self._dynamic.last_overflow_iter

    @property
    def _dynamic(self) -> DynamicLossScaler:
        if isinstance(self.loss_scaler, DynamicLossScaler):
            return self.loss_scaler
        raise AttributeError("a static loss scale has no factor, window and overflows")

    def __getattr__(self, name: str) -> Any:
        if name == "fp32_groups_flat":  # a copy would lose what is written into it
            raise AttributeError(
                "FP16_Optimizer has no fp32_groups_flat: its masters are not joined in one tensor "
                "for each group. Use fp32_groups, a list of masters for each group."
            )
        return super().__getattr__(name)

    @property
    def fp32_groups(self) -> list[list[torch.Tensor]]:
        """What the wrapped optimizer steps, by group: masters, and parameters that have none."""
        return [list(group["params"]) for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bit-exact resume needs besides the model's ``state_dict``."""
        return {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_iter": self.cur_iter,
            **checkpoint.scaler_to_dict(self.loss_scaler),  # a dynamic one has its own cur_iter
            "optimizer_state_dict": self.optim.state_dict(),
            "fp32_groups": [[tensor.detach() for tensor in group] for group in self.fp32_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, here or in NVIDIA's Apex.

        Raises:
            ValueError: Keys, groups or shapes do not fit; nothing was changed.
        """
        wanted = ("dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict")
        checkpoint.check_keys(state_dict, wanted)
        checkpoint.check_keys(state_dict["optimizer_state_dict"], ("state", "param_groups"))
        self._params.add_new(self.optim)
        if "fp32_groups_flat" in state_dict:
            state_dict = checkpoint.from_flat(state_dict, self.fp32_groups)
        checkpoint.check_keys(state_dict, ("fp32_groups",))
        cur_iter = checkpoint.whole("cur_iter", state_dict["cur_iter"])
        numbers = dict(state_dict)
        if not numbers["dynamic_loss_scale"]:
            numbers = {"cur_scale": numbers["cur_scale"]}
        scaler = checkpoint.scaler_from(numbers)
        checkpoint.check_masters(state_dict["fp32_groups"], self.fp32_groups)
        self.optim.load_state_dict(state_dict["optimizer_state_dict"])
        load(self.fp32_groups, state_dict["fp32_groups"])
        self._set_scaler(scaler)
        self.cur_iter = cur_iter
        self.overflow = False
