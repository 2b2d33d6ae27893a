"""What updates would lose if the weights themselves had 16 bits: masters or not (O2 or O3)."""

from __future__ import annotations

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
        self.name = "AdamW at lr 0.001"
        if optimizer is None:
            self.optimizer: Any = torch.optim.AdamW(self.weights, lr=1e-3)
        else:
            self.optimizer = self._copied(weights, optimizer)
            self.name = type(optimizer).__name__
        self.lost: dict[str, float] = {}

    def _copied(self, weights: Sequence[torch.Tensor], optimizer: Any) -> Any:
        """The optimizer made again, for the copies; hooks on it are not."""
        copies = {id(one): copy for one, copy in zip(weights, self.weights, strict=True)}
        groups = [
            {**group, "params": [copies.get(id(p), p) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        if any(one is p for g in groups for one in g["params"] for p in _params(optimizer)):
            raise ValueError(
                f"apex.debug.what_if: the {type(optimizer).__name__} has weights that are not the "
                "model's, or do not require a gradient. Pass the optimizer of this model alone, or "
                "leave it out."
            )
        try:
            made = type(optimizer)(groups)
            made.load_state_dict(optimizer.state_dict())
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"apex.debug.what_if: a second {type(optimizer).__name__} cannot be made from the "
                f"param_groups and the state of the first ({error}). Leave optimizer out."
            ) from error
        return made

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Make one update, and note what of it 16-bit weights would lose."""
        before = [weight.detach().clone() for weight in self.weights]
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = None if gradient is None else gradient.clone()
        type(self.optimizer).step(self.optimizer)
        for dtype in HALVES:
            lost = total = 0
            for old, new in zip(before, self.weights, strict=True):
                update, kept = new.detach() - old, old.to(dtype)
                moved = update != 0
                same = (kept.float() + update).to(dtype) == kept
                lost += int(torch.count_nonzero(same & moved))
                total += int(torch.count_nonzero(moved))
            self.lost[str(dtype).removeprefix("torch.")] = lost / max(total, 1)


def _params(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
