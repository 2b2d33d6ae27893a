"""What passes of ``scale_loss`` leave behind, and how gradients are put together again.

``Pass`` is for the step to look at; ``Debt`` is for gradients that are still scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from apex.amp.scaler import LossScaler

if TYPE_CHECKING:
    from apex.amp.optimizer import OptimizerState

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
    """Gradients that one pass, or several of one kind with ``delay_unscale``, have left scaled.

    The optimizers of a pass owe it together: what is not finite in one skips the step of all.

    Attributes:
        scaler: Whose scale the pass began with.
        index: The scaler's number.
        scale: The scale the pass began with.
        turn: Which of the scaler's turns that was.
        states: The optimizers that were listed.
        loss: To tell who was non-finite.
        kept: Whether the gradients are to stay scaled until the step, of their own accord.
    """

    __slots__ = ("index", "kept", "loss", "scale", "scaler", "states", "turn")

    def __init__(
        self,
        scaler: LossScaler,
        index: int,
        scale: torch.Tensor | float,
        states: list[OptimizerState],
        loss: torch.Tensor,
    ) -> None:
        self.scaler = scaler
        self.index = index
        self.scale = scale
        self.turn = scaler._turn
        self.states = states
        self.loss = loss
        self.kept = False

    def matches(self, other: Debt) -> bool:
        """Whether the gradients of another pass may be added to these before they are unscaled."""
        if set(self.states) != set(other.states):
            return False
        if isinstance(self.scale, torch.Tensor):
            return self.scaler is other.scaler and self.turn == other.turn
        return self.scale == other.scale

    def settle(self, asides: Sequence[Aside], *, check: bool = True) -> None:
        """Unscale, tell the optimizers whether all was finite, and let the scale back off.

        Args:
            asides: For each of ``states``, the unscaled gradients to add.
            check: ``False`` leaves the scale alone.
        """
        done: set[int] | None = set() if len(self.states) > 1 else None
        flags = []
        for state, aside in zip(self.states, asides, strict=True):
            flag = state.close(aside, self.scale, done)
            if flag is not None:
                flags.append(flag)
        if not flags:
            return
        found = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        for state in (*self.states, *self.states[0].training.sharers(self.states)):
            state.record(self.scaler, self.index, found, self.loss)
        self.scaler.finish_pass(found, check=check)


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
