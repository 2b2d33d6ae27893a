"""What passes of ``scale_loss`` leave behind, and how gradients are put together again.

``Pass`` is for the step to look at; ``Debt`` is for gradients that are still scaled.
"""

from __future__ import annotations

import torch

from apex.amp.scaler import LossScaler

Aside = dict[torch.Tensor, torch.Tensor]  # gradients set aside, by the tensor they belong to


class Pass:
    """One backward pass: its scaler, its flag, and the loss, to tell who was non-finite."""

    __slots__ = ("epoch", "found", "index", "loss", "scaler")

    def __init__(
        self, scaler: LossScaler, index: int, found: torch.Tensor, loss: torch.Tensor
    ) -> None:
        self.scaler = scaler
        self.index = index
        self.found = found
        self.loss = loss
        self.epoch = scaler._epoch


class Debt:
    """Gradients left scaled by passes with ``delay_unscale``."""

    __slots__ = ("index", "loss", "scale", "scaler", "state", "unscaled")

    def __init__(
        self, scaler: LossScaler, index: int, scale: torch.Tensor | float, loss: torch.Tensor
    ) -> None:
        self.scaler = scaler
        self.index = index
        self.scale = scale
        self.state = scaler._state
        self.loss = loss.detach()
        self.unscaled: Aside = {}

    def matches(self, scaler: LossScaler, scale: torch.Tensor | float) -> bool:
        """Whether a pass with this scale may add to the same gradients."""
        if isinstance(scale, torch.Tensor):
            return scaler is self.scaler and scaler._state is self.state
        return scale == self.scale


def stored_values(grad: torch.Tensor) -> torch.Tensor:
    """The elements that ``grad`` stores: all of a dense one, the given ones of a sparse one."""
    return grad.coalesce().values() if grad.is_sparse else grad


def unshared(grad: torch.Tensor) -> torch.Tensor:
    """The gradient, copied if it is part of a buffer that the next backward may write to."""
    if grad.is_sparse or grad.untyped_storage().nbytes() <= grad.numel() * grad.element_size():
        return grad
    return grad.clone()


@torch.no_grad()
def accumulate(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each tensor its new gradient, on top of what it has accumulated."""
    into: list[torch.Tensor] = []
    new: list[torch.Tensor] = []
    for tensor, grad in pairs:
        if tensor.grad is None:
            tensor.grad = grad
        elif grad.is_sparse or tensor.grad.is_sparse:
            tensor.grad = tensor.grad + grad
        else:
            into.append(tensor.grad)
            new.append(grad)
    if new:
        torch._foreach_add_(into, new)


@torch.no_grad()
def add_back(aside: Aside) -> None:
    """Add gradients that were set aside to those that are there now."""
    into: list[torch.Tensor] = []
    old: list[torch.Tensor] = []
    for target, before in aside.items():
        now = target.grad
        if now is None:
            target.grad = before
        elif now.is_sparse or before.is_sparse:
            target.grad = before + now
        else:
            into.append(now)
            old.append(before)
    if into:
        torch._foreach_add_(into, old)
