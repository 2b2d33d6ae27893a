"""Float32 gradients of masters, whose memory is kept from pass to pass where they are small."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch

from apex import _compat

_REQUIRES_GRAD = operator.attrgetter("requires_grad")

# Elements up to which the memory of a master's gradient is kept between steps. To allocate it costs
# 1.3 us a tensor, as much as to fill 2**14 elements; larger ones would only cost memory.
_MOST_KEPT = 2**14


class KeptGradients:
    """Uninitialised float32 gradients; the small ones have the memory of those of the last pass.

    It is used again when nothing else holds a tensor or its memory: when they have as many owners,
    in Python and in C++, as at first. Memory that was shared with another process has moved.
    """

    def __init__(self) -> None:
        self._masters: Any = None

    def _keep(self, grads: Sequence[torch.Tensor], masters: Any) -> None:
        self._masters = masters  # the larger gradients' too
        self._is_small = [grad.numel() <= _MOST_KEPT for grad in grads]
        both = zip(grads, self._is_small, strict=True)
        self._tensors = [_empty_float32(grad) for grad, is_small in both if is_small]
        self._storages = [tensor.untyped_storage() for tensor in self._tensors]
        self._in_c = [storage._cdata for storage in self._storages]
        self._at_first = self._state()

    def _state(self) -> tuple[Any, ...]:
        tensors, in_c = self._tensors, self._in_c
        count: Any = torch.Tensor._use_count  # type: ignore[attr-defined]
        in_python = list(map(sys.getrefcount, tensors)), list(map(sys.getrefcount, self._storages))
        owners = *in_python, list(map(count, tensors)), list(map(_compat.storage_use_count, in_c))
        return *owners, addresses(tensors), list(map(_REQUIRES_GRAD, tensors))

    def like(self, grads: Sequence[torch.Tensor], masters: Any) -> list[torch.Tensor]:
        """Gradients of the shapes and devices of ``grads``, kept for the same ``masters``."""
        if _compat.storage_use_count is None:
            return [_empty_float32(grad) for grad in grads]
        if self._masters != masters or self._state() != self._at_first:
            self._keep(grads, masters)
        if len(self._tensors) == len(grads):
            return list(self._tensors)
        tensors, both = iter(self._tensors), zip(grads, self._is_small, strict=True)
        return [next(tensors) if is_small else _empty_float32(grad) for grad, is_small in both]


def _empty_float32(grad: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(grad, dtype=torch.float32, requires_grad=False)


def addresses(tensors: Sequence[torch.Tensor]) -> Sequence[int]:
    """Where the tensors' memory is; 0 for those that have none of their own."""
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # fake tensors, and wrappers of several tensors
        return [0] * len(tensors)
