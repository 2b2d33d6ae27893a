"""Updates that round away in 16-bit weights: how many, and who keeps them on purpose.

One place for the threshold and the count, which optimizers and ``apex check`` read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MOST = 0.2  # share of updates; two healthy 16-bit trainings lose 0.035 and 0.146


class LostUpdates:
    """Counts elements with a gradient that an update has not moved.

    Nothing waits for the device until the numbers are read.
    """

    def __init__(self) -> None:
        #: Of each device: how many were lost, and of how many.
        self.counts: list[torch.Tensor] = []

    def count(self, before: torch.Tensor, after: torch.Tensor, grad: torch.Tensor) -> None:
        """Compare a tensor before and after an update."""
        moves = grad != 0
        new = torch.stack([((before == after) & moves).sum(), moves.sum()])
        if self.counts and self.counts[-1].device == new.device:
            new += self.counts.pop()
        self.counts.append(new)

    def numbers(self) -> tuple[int, int]:
        """How many updates were lost, of how many."""
        pairs = [counts.tolist() for counts in self.counts]
        return sum(lost for lost, _ in pairs), sum(there for _, there in pairs)

    def share(self) -> float:
        """The share of lost updates."""
        lost, there = self.numbers()
        return lost / max(1, there)


def keeps_what_is_lost(
    before: torch.Tensor,
    after: torch.Tensor,
    grad: torch.Tensor,
    old: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
) -> bool:
    """Whether a state beside a 16-bit weight has what the weight rounds away.

    That is so for a master (float32, and the weight is its rounding), for low bits (integers of 16
    bits or more that have changed), and for a compensation: of both signs, never above one unit in
    the last place of the weight; where the weight stands it moves against the gradient, and where
    small updates have added up to a move it changes its sign against that.

    Args:
        before: The weight before the step.
        after: The weight after it.
        grad: Its gradient.
        old: States of the weight's shape, before the step.
        state: The same after it.
    """
    return any(
        _keeps(before, after, grad, old.get(name), now)
        for name, now in state.items()
        if now.shape == after.shape
    )


def _keeps(
    before: torch.Tensor, after: torch.Tensor, grad: torch.Tensor, old: Any, now: torch.Tensor
) -> bool:
    if not now.is_floating_point():
        return now.element_size() >= 2 and (old is None or not torch.equal(old, now))
    if now.dtype not in (torch.float16, torch.bfloat16) and torch.equal(now.to(after.dtype), after):
        return True
    limits = torch.finfo(after.dtype)
    was, value, error = before.double(), after.double(), now.double()
    unit = torch.maximum(was.abs(), value.abs()).clamp_min(limits.tiny) * limits.eps
    if bool((error.abs() > unit).any()) or bool((error >= 0).all()) or bool((error <= 0).all()):
        return False
    step, change = value - was, error if old is None else error - old.double()
    stands, moved = (step == 0) & (change != 0), step != 0
    crossed = moved & ((step + change).abs() < step.abs() / 2)  # small updates that added up
    agrees = (
        ((change - error) * step < 0) & (error * step < 0) if crossed.any() else change * step < 0
    )
    is_kept = _mostly(agrees[crossed if crossed.any() else moved], 0.9)
    return is_kept and _mostly((change * grad)[stands] < 0, 0.5)


def _mostly(truths: torch.Tensor, share: float) -> bool:
    return not truths.numel() or float(truths.double().mean()) > share
