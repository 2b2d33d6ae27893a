"""What a skipped step has left: its passes, which count until its gradients are gone.

The gradients stay in ``.grad`` for the program to look at. The next block drops what is there:
zeros take its place. A step before it is skipped as well, unless the program has put others there,
as ``p.grad = None`` and a plain backward do, or has written to them, as zeros, and all are finite:
what was made of an overflow is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from apex.amp.gradients.agreement import agree_
from apex.amp.gradients.masters import has_version
from apex.amp.gradients.tensors import stored_values, zero_where
from apex.ops.lists.tensor_lists import local


class Left:
    """The passes of a step that was skipped, or may have been where a device decides.

    Args:
        passes: They have flags.
        stepped: What the optimizer steps. The first one with a gradient tells whether others are
            there now, or other values: to note all would take 0.2 ms for 1,000, in each step on a
            GPU.
    """

    def __init__(self, passes: Sequence[Any] = (), stepped: Iterable[torch.Tensor] = ()) -> None:
        self.passes = list(passes)
        both = ((tensor, tensor.grad) for tensor in stepped)
        first = next(((tensor, grad) for tensor, grad in both if grad is not None), None)
        self._first = first and (first[0], weakref.ref(first[1]), _version(first[1]))

    def _is_written(self, ledger: Any) -> bool:
        """Whether others are there; with a ``process_group`` ranks may not differ in it."""
        if self._first is None or ledger.training.process_group is not None:
            return False
        tensor, grad, version = self._first
        now = tensor.grad
        return now is not None and (now is not grad() or _version(now) != version)

    def for_step(self, ledger: Any, grads: Sequence[torch.Tensor]) -> list[Any]:
        """The passes that a step of ``grads`` has to look at, without a pass of its own."""
        if not grads or not self._is_written(ledger):
            return self.passes
        first = self.passes[0]
        never = torch.full_like(first.counted, -1.0)  # so that the scaler does not count the step
        found_inf = agree_(_found_inf(grads, first.found_inf), [ledger])
        return [replace(first, found_inf=found_inf, counted=never)]

    def drop(self, grads: Sequence[torch.Tensor]) -> None:
        """Set ``grads`` to zeros; where a device has decided, the device does."""
        zero_where([one.found_inf for one in self.passes], grads)


def _version(grad: torch.Tensor) -> int:
    return grad._version if has_version(grad) else -1


@torch.no_grad()
def _found_inf(grads: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Whether one of ``grads`` is not finite: 1 or 0, of the kind of ``like``; nothing waits."""
    finite = [torch.isfinite(stored_values(local(grad))).all() for grad in grads]
    return torch.stack([1 - one.to(like, non_blocking=True) for one in finite]).amax()
