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
    below half a unit in the last place.

    Args:
        weights: The parameters that the gradients are of.
        optimizer: Whose class, options and state the copy has; ``None`` for AdamW's defaults.
    """

    def __init__(self, weights: Sequence[torch.Tensor], optimizer: Any) -> None:
        self.weights = [torch.nn.Parameter(one.detach().clone()) for one in weights]
        self.before, self.gradients = (
            [torch.empty_like(w.detach()) for w in self.weights] for _ in "12"
        )
        if optimizer is None:  # fused: 4 instead of 11 ms for 24 linear layers of 256 on a CPU
            self.optimizer: Any = torch.optim.AdamW(self.weights, fused=True)
            self.name = "AdamW at lr 0.001"
            return
        self.name = type(optimizer).__name__
        copies = dict(zip(map(id, weights), self.weights, strict=True))
        every = [p for group in optimizer.param_groups for p in group["params"]]
        frozen = {id(p): p.detach().clone() for p in every if not p.requires_grad}
        copies = {**frozen, **copies}  # its state is by the numbers of all
        try:
            groups = [
                {**group, "params": [copies[id(p)] for p in group["params"]]}
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
        """Make one update."""
        places = zip(self.weights, self.before, self.gradients, gradients, strict=True)
        for weight, before, own, gradient in places:
            before.copy_(weight.detach())
            # fused AdamW reads a gradient as if its strides were the weight's
            weight.grad = None if gradient is None else own.copy_(gradient)
        self.optimizer.step()

    def lost(self) -> dict[str, float]:
        """Of each 16-bit type the share of the last updates that weights in it would lose."""
        pairs = [(old, w.detach() - old) for w, old in zip(self.weights, self.before, strict=True)]
        total, found = sum(int(torch.count_nonzero(new)) for _, new in pairs), {}
        for dtype in HALVES:
            same = [(o.to(dtype).float() + u).to(dtype) == o.to(dtype) for o, u in pairs]
            both = zip(same, pairs, strict=True)
            lost = sum(int(torch.count_nonzero(one & (update != 0))) for one, (_, update) in both)
            found[str(dtype).removeprefix("torch.")] = lost / max(total, 1)
        return found
