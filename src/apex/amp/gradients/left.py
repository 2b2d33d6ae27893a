"""What a skipped step has left: its passes, which count until its gradients are gone.

The gradients stay in ``.grad`` for the program to look at. The next block drops what is there:
zeros take its place. A step before it is skipped as well, unless the program has put others there,
as ``p.grad = None`` and a plain backward do, and all are finite: what was made of an overflow is
not. Zeros that the program has written to all of them are gradients: momentum and decay move.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from apex.amp.gradients.agreement import agree_
from apex.amp.gradients.tensors import stored_values, zero_where
from apex.ops.lists.tensor_lists import local


class Left:
    """The passes of a step that was skipped, or may have been where a device decides.

    Args:
        passes: They have flags.
        stepped: What the optimizer steps. The first one with a gradient tells whether others, or
            other values, are there now: to note all would take 0.2 ms for 1,000, in each step on a
            GPU.
    """

    def __init__(self, passes: Iterable[Any] = (), stepped: Iterable[torch.Tensor] = ()) -> None:
        self.passes = list(passes)
        both = ((one, one.grad) for one in stepped)
        first = ((one, weakref.ref(grad), grad._version) for one, grad in both if grad is not None)
        self._first = next(first, None)

    def _changes(self) -> tuple[bool, bool]:
        """Whether another gradient is there, or this one was written."""
        tensor, grad, version = self._first or (None, None, 0)
        now = None if tensor is None else tensor.grad
        if now is None or grad is None or now is not grad():
            return now is not None, False
        return False, now._version != version

    def for_step(self, ledger: Any, grads: Sequence[torch.Tensor]) -> list[Any]:
        """The passes that a step of ``grads`` has to look at, without a pass of its own.

        With a ``process_group`` ranks may not differ in it.
        """
        if not grads or ledger.training.process_group is not None or not self._changes()[0]:
            return self.passes
        flags = [~torch.isfinite(values).all() for values in map(_values, grads)]
        return [_uncounted(self.passes[0], self._any(flags, ledger))]

    def without_zeros(self, ledger: Any, tensors: Sequence[torch.Tensor]) -> Left:
        """What is left, without overflow where all gradients were set to zeros; nothing waits."""
        if self._changes() != (False, True):
            return self
        flags = [_values(grad).any() for tensor in tensors if (grad := tensor.grad) is not None]
        are_left = self._any(flags, ledger)
        flags = [one.found_inf * are_left.to(one.found_inf) for one in self.passes]
        return Left(map(_uncounted, self.passes, flags), tensors)

    def _any(self, flags: Iterable[torch.Tensor], ledger: Any) -> torch.Tensor:
        """Whether one of ``flags`` is set, of the kind of the first pass's; nothing waits."""
        like = self.passes[0].found_inf
        return agree_(
            torch.stack([one.to(like, non_blocking=True) for one in flags]).amax(), [ledger]
        )

    def drop(self, grads: Sequence[torch.Tensor]) -> None:
        """Set ``grads`` to zeros; where a device has decided, the device does."""
        zero_where([one.found_inf for one in self.passes], grads)


def _values(grad: torch.Tensor) -> torch.Tensor:
    return stored_values(local(grad)).detach()


def _uncounted(one: Any, found_inf: torch.Tensor) -> Any:
    """A pass with another flag, of which the scaler does not count a step."""
    return replace(one, found_inf=found_inf, counted=torch.full_like(one.counted, -1.0))
