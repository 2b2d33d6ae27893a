"""Tells once that bfloat16 weights lose their updates, where nobody has chosen how to store them.

The first ten steps of such an optimizer are looked at: of at most 64 weights, spread over all, up
to 1,024 elements each are compared before and after the update. Count and threshold are those of
``apex check`` (:mod:`apex.ops.lists.lost_updates`). A GPU is not waited for: the numbers are
copied, and read at a later step.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from apex.ops import _runtime
from apex.ops._async_copy import AsyncCopy
from apex.ops.lists.lost_updates import MOST, LostUpdates
from apex.ops.lists.tensor_lists import local
from apex.optimizers._step import GroupGrads

STEPS, WEIGHTS, ELEMENTS = 10, 64, 1024


class _ByDefault(str):
    """The default of an argument: equal to what a program may write, and told apart from it."""

    __slots__ = ()


PLAIN_BY_DEFAULT: str = _ByDefault("plain")


class Sample(NamedTuple):
    """Some elements of a weight, what they were, and their gradients."""

    now: torch.Tensor
    before: torch.Tensor
    grad: torch.Tensor


class LostWatch:
    """What is known of the updates of one optimizer."""

    def __init__(self) -> None:
        self._lost, self._left = LostUpdates(), STEPS
        self._copies: list[AsyncCopy] = []

    def before(self, active: Sequence[GroupGrads]) -> list[Sample] | None:
        """Copy elements of weights that are about to be stepped; ``None`` if none is bfloat16."""
        if not self._left or _runtime.capturing():
            return []
        if not any(param.dtype == torch.bfloat16 for one in active for param in one.params):
            return None
        pairs = [
            (local(param).detach(), local(grad).detach())
            for group, params, grads in active
            if not (isinstance(rate := group.get("lr"), float | int) and rate == 0)
            for param, grad in zip(params, grads, strict=True)
            if param.dtype == torch.bfloat16
        ]
        pairs = [(p, g) for p, g in pairs if p.is_contiguous() and g.is_contiguous() and p.numel()]
        samples = []
        for weight, grad in pairs[:: max(1, -(-len(pairs) // WEIGHTS))]:
            every = -(-weight.numel() // ELEMENTS)
            now = weight.view(-1)[::every]
            samples.append(Sample(now, now.clone(), grad.view(-1)[::every].clone()))
        return samples

    def counts(self, samples: list[Sample] | None, noop: torch.Tensor | None, name: str) -> bool:
        """Count those that have not moved, unless the step was skipped; whether to go on.

        After ten steps it warns, from the share on that ``apex check`` tells of.
        """
        if samples is None:
            return False
        for now, before, grad in samples:
            if noop is not None:
                taken = noop.to(grad.device, non_blocking=True) == 0
                grad = torch.where(taken, grad, torch.zeros_like(grad))
            self._lost.count(before, now, grad)
        self._left -= bool(samples)
        numbers = None if self._left else self._numbers()
        if numbers is None:
            return True
        lost, there = numbers
        if there and lost >= MOST * there:
            warnings.warn(
                f"{name}: {100 * lost / there:.0f} % of the updates of bfloat16 weights were lost "
                f"in its first {STEPS} steps. Elements with a gradient did not move, because their "
                "updates are too small for the 8 bits of bfloat16. Keep the weights in float32 and "
                "compute in bfloat16 (torch.autocast, or amp at O4 or O5), or pass storage='auto', "
                "which keeps what is rounded away. Pass storage='plain' to keep it like this "
                "without the warning.",
                stacklevel=2,
            )
        return False

    def _numbers(self) -> tuple[int, int] | None:
        """How many updates were lost, of how many; ``None`` until a GPU has told."""
        counts = self._lost.counts
        if not any(_runtime.waits(one.device) for one in counts):
            return self._lost.numbers()
        self._copies = self._copies or [*map(AsyncCopy, counts)]
        if not all(copy.arrives for copy in self._copies):
            return 0, 0
        read = [copy.read() for copy in self._copies]
        known = [pair for pair in read if pair is not None]
        if len(known) < len(read):
            return None
        return int(sum(pair[0] for pair in known)), int(sum(pair[1] for pair in known))
