"""Loss scales as Python numbers, for programs that scale by hand.

:class:`FP16_Optimizer` keeps one of these as its ``loss_scaler``. ``amp.initialize`` has its own
(:mod:`apex.amp.scale`), whose numbers stay on the gradients' device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from apex.amp.scale import TINY, bounded, check, check_bounds
from apex.fp16_utils.fp16util import to_python_float

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


def check_scale(name: str, value: Any) -> float:
    """Return a loss scale as a float, or raise ``ValueError`` naming it."""
    try:
        scale = float(value)
    except (TypeError, ValueError):
        scale = math.nan
    if not TINY <= scale <= 1 / TINY:
        raise ValueError(f"{name} was {value!r}; it must be a number from 2**-126 to 2**126.")
    return scale


class LossScaler:
    """A loss scale that never changes.

    Raises:
        ValueError: ``scale`` is not a number from 2**-126 to 2**126.

    Attributes:
        cur_scale: The scale. You can set it.

    Example:
        >>> scaler = LossScaler(128.0)
        >>> weight = torch.ones(2, requires_grad=True)
        >>> scaler.backward(weight.sum())
        >>> weight.grad
        tensor([128., 128.])
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = check_scale("LossScaler: scale", scale)

    @property
    def loss_scale(self) -> float:
        """The loss scale."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return False, without a check."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing."""

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Any, ...]:
        """Multiply gradients by the scale. Use it as a full backward hook of a module."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backpropagate the loss times the scale. The product is at least float32."""
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"backward: loss was a {type(loss).__name__}; it must be a tensor.")
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        torch.autograd.backward(wide * self.loss_scale, retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that shrinks after an overflow and grows after iterations without one.

    Args:
        init_scale: First scale, within the limits.
        scale_factor: Factor by which the scale grows and shrinks.
        scale_window: Number of iterations in a row without overflow after which it grows.
        min_loss_scale: Lower limit; ``None`` means the smallest normal float32.
        max_loss_scale: Upper limit; ``None`` means 2**126.

    Raises:
        ValueError: A number is out of range.

    Attributes:
        cur_scale: The scale. You can set it.
        cur_iter: Number of calls of :meth:`update_scale`.
        last_overflow_iter: ``cur_iter`` at the last overflow; -1 before the first one.
    """

    # Objects that were pickled by NVIDIA's Apex of 2018 do not have these two.
    min_loss_scale: float | None = 1.0
    max_loss_scale: float | None = None

    def __init__(
        self,
        init_scale: float = 2**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        *,
        min_loss_scale: float | None = 1.0,
        max_loss_scale: float | None = None,
    ) -> None:
        self.cur_scale = check_scale("DynamicLossScaler: init_scale", init_scale)
        check("scale_factor", scale_factor, lambda x: 1.0 < x < math.inf, "above 1")
        check("scale_window", scale_window, lambda x: x >= 1 and not x % 1, "an integer above 0")
        check_bounds(min_loss_scale, max_loss_scale)
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self.cur_scale = self._bounded(self.cur_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = float(scale_factor)
        self.scale_window = int(scale_window)

    def _bounded(self, scale: float) -> float:
        return bounded(scale, self.min_loss_scale, self.max_loss_scale, 1 / TINY)

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether any tensor's ``.grad`` has an inf or NaN. Waits for the device once."""
        grads = [param.grad for param in params if param.grad is not None]
        flags = [self._has_inf_or_nan(grad) for grad in grads]
        return bool(flags) and bool(torch.stack([flag.to(flags[0].device) for flag in flags]).any())

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
        values = x.coalesce().values() if x.is_sparse else x
        return ~torch.isfinite(values).all()

    def update_scale(self, overflow: bool) -> None:
        """End an iteration: shrink after an overflow, grow after ``scale_window`` without one."""
        if overflow:
            self.cur_scale = self._bounded(self.cur_scale / self.scale_factor)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale = self._bounded(self.cur_scale * self.scale_factor)
        self.cur_iter += 1
