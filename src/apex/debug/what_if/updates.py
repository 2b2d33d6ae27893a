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
        optimizer: Whose class, options and state the copy has; ``None`` for AdamW's defaults.
    """

    def __init__(self, weights: Sequence[torch.Tensor], optimizer: Any) -> None:
        self.weights = [torch.nn.Parameter(one.detach().clone()) for one in weights]
        self._pending: Sequence[torch.Tensor | None] | None = None
        if optimizer is None:  # fused: 4 instead of 11 ms for 24 linear layers of 256 on a CPU
            self.optimizer: Any = torch.optim.AdamW(self.weights, fused=True)
            self.name = "AdamW at lr 0.001"
            return
        self.name = type(optimizer).__name__
        copies = dict(zip(map(id, weights), self.weights, strict=True))
        try:
            groups = [{**group} for group in optimizer.param_groups]
            for group in groups:  # with what is frozen: the state is by the numbers of all
                every = group["params"]
                group["params"] = [copies[id(p)] if p.requires_grad else p.clone() for p in every]
            self.optimizer = type(optimizer)(groups)  # without the hooks on the first
            self.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"apex.debug.what_if: the {self.name} cannot be made again for copies of the "
                "model's weights, from param_groups and state_dict(); leave optimizer out"
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
                f"apex.debug.what_if: a single step of a copy of the {self.name}, with dense "
                f"gradients and without a closure, failed ({error}); leave optimizer out"
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
