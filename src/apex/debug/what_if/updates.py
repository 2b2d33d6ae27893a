"""What updates would lose if the weights themselves had 16 bits: masters or not (O2 or O3)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from apex.debug.tensors import HALVES


class Updates:
    """Steps copies of the weights by a copy of the optimizer, with the gradients of each batch.

    An update is lost where the 16-bit weight plus the update rounds to the weight again: it is
    below half a unit in the last place. ``lost`` has the shares of the last step.

    Args:
        weights: The parameters that the gradients are of.
        optimizer: Whose class, options and state the copy has; ``None`` for AdamW's defaults.
    """

    def __init__(self, weights: Sequence[torch.Tensor], optimizer: Any) -> None:
        self.weights = [torch.nn.Parameter(one.detach().clone()) for one in weights]
        self.lost: dict[str, float] = {}
        if optimizer is None:
            self.name, self.optimizer = "AdamW at lr 0.001", torch.optim.AdamW(self.weights)
            return
        self.name = type(optimizer).__name__
        copies = dict(zip(map(id, weights), self.weights, strict=True))
        try:
            groups = [
                {**group, "params": [copies[id(p)] for p in group["params"] if p.requires_grad]}
                for group in optimizer.param_groups
            ]
            self.optimizer = type(optimizer)(groups)  # without the hooks on the first
            self.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"apex.debug.what_if: the {self.name} cannot be made again for copies of the "
                "model's weights, from param_groups and state_dict(); leave optimizer out"
            ) from error

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Make one update, and note what of it 16-bit weights would lose."""
        before = [weight.detach().clone() for weight in self.weights]
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = None if gradient is None else gradient.clone()
        self.optimizer.step()
        updates = [new.detach() - old for new, old in zip(self.weights, before, strict=True)]
        total = sum(int(torch.count_nonzero(one)) for one in updates)
        for dtype in HALVES:
            both = zip([one.to(dtype) for one in before], updates, strict=True)
            same = [((old.float() + new).to(dtype) == old) & (new != 0) for old, new in both]
            lost = sum(int(torch.count_nonzero(one)) for one in same)
            self.lost[str(dtype).removeprefix("torch.")] = lost / max(total, 1)
