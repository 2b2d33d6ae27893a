"""What updates would lose if the weights themselves had 16 bits: masters or not (O2 or O3)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from apex.debug.tensors import HALVES
from apex.debug.what_if.formats import nonzero, rounded, rounded_


class Updates:
    """Steps copies of the weights by a copy of the optimizer, with the gradients of each batch.

    An update is lost where the 16-bit weight plus the update rounds to the weight again: it is
    below half a unit in the last place.

    Args:
        weights: The parameters that the gradients are of.
        optimizer: Which is copied with its options and state; ``None`` for AdamW's defaults.
    """

    def __init__(self, weights: Sequence[torch.Tensor], optimizer: Any) -> None:
        self.name = "AdamW at lr 0.001" if optimizer is None else type(optimizer).__name__
        if optimizer is None:  # fused: 4 instead of 11 ms for 24 linear layers of 256 on a CPU
            optimizer = torch.optim.AdamW(weights, fused=True)
        memo: dict[int, Any] = {}
        self.weights = copy.deepcopy([*weights], memo)
        self._pending: Sequence[torch.Tensor | None] | None = None
        try:
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            if not {id(p) for p in stepped if p.requires_grad} <= memo.keys():
                raise ValueError("it steps weights that are not in the model")
            self.optimizer = copy.deepcopy(optimizer, memo)  # without the hooks on the first
            if type(optimizer).__getstate__ is torch.optim.Optimizer.__getstate__:
                own = vars(optimizer).keys() - vars(self.optimizer).keys()  # torch leaves them out
                for name in own - {"step", "zero_grad"}:  # which schedulers put there
                    setattr(self.optimizer, name, copy.deepcopy(getattr(optimizer, name), memo))
        except Exception as error:
            raise TypeError(
                f"apex.debug.what_if: the {self.name} cannot be copied together with the model's "
                f"weights ({error}); leave optimizer out"
            ) from error

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Make an update by the gradients of each batch, the last one only for :meth:`lost`."""
        if self._pending is not None:
            self._step(self._pending)
        self._pending = gradients

    def _step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            if gradient is not None and gradient.stride() != weight.stride():
                # fused AdamW reads a gradient as if its strides were the weight's
                gradient = torch.empty_like(weight.detach()).copy_(gradient)
            weight.grad = gradient
        try:
            self.optimizer.step()
        except Exception as error:
            raise TypeError(
                f"apex.debug.what_if: a copy of the {self.name} failed in a step with dense "
                f"gradients and without a closure ({error}); leave optimizer out"
            ) from error

    def lost(self) -> dict[str, float]:
        """Of each 16-bit type the share of the last updates that weights in it would lose."""
        before = [weight.detach().clone() for weight in self.weights]
        self._step(self._pending or [])
        pairs = [(old, w.detach() - old) for w, old in zip(self.weights, before, strict=True)]
        total, found = sum(nonzero(update) for _, update in pairs), {}
        for dtype in HALVES:
            kept = 0
            for old, update in pairs:
                narrow = rounded(old, dtype)
                change = rounded_(narrow + update, dtype).sub_(narrow)
                kept += nonzero(change.nan_to_num_())  # inf - inf
            found[str(dtype).removeprefix("torch.")] = (total - kept) / max(total, 1)
        return found
