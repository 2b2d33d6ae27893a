"""Gradients as tensors: adding up, clearing, keeping their memory."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from apex import _compat
from apex.ops.lists.tensor_lists import OWN_MEMORY, local

IS_SPARSE = operator.attrgetter("is_sparse")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
# Elements up to which the memory of a master's gradient is kept between steps. To allocate it costs
# 1.3 us a tensor, as much as to fill 2**14 elements; larger ones would only cost memory.
_MOST_KEPT = 2**14


def stored_values(grad: torch.Tensor) -> torch.Tensor:
    """The elements that ``grad`` stores: all of a dense one, the given ones of a sparse one."""
    return grad.coalesce().values() if grad.is_sparse else grad


def grads_of(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of those ``weights`` that have one; sparse ones become coalesced."""
    grads = [grad for weight in weights if (grad := weight.grad) is not None]
    if not any(map(IS_SPARSE, grads)):
        return grads
    for weight in weights:
        if weight.grad is not None and weight.grad.is_sparse:
            weight.grad = weight.grad.coalesce()
    return [grad for weight in weights if (grad := weight.grad) is not None]


def any_grad(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of ``tensors`` has a gradient."""
    return next((True for tensor in tensors if tensor.grad is not None), False)


@torch.no_grad()
def accumulate(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each tensor its new gradient, on top of what it has accumulated."""
    into: list[torch.Tensor] = []
    new: list[torch.Tensor] = []
    for tensor, grad in pairs:
        now = tensor.grad
        if now is None:
            tensor.grad = grad
        elif grad.is_sparse or now.is_sparse:
            tensor.grad = now + grad
        elif now.is_neg() or not OWN_MEMORY.issuperset((type(now), type(grad))):
            now.add_(grad)  # DTensors, of any meshes and placements; signs that are a bit
        else:
            into.append(now)
            new.append(grad)
    if new:
        torch._foreach_add_(into, new)


def write_zeros(grad: torch.Tensor) -> None:
    """Set a gradient to zeros, as ``Optimizer.zero_grad(set_to_none=False)`` does."""
    if grad.grad_fn is not None:
        grad.detach_()  # not always: gradient_as_bucket_view makes views, which refuse it
    grad.requires_grad_(False).zero_()


@torch.no_grad()
def zero_where(flags: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    """Set all ``grads`` to zeros if one of ``flags`` is not 0; nothing waits for a device."""
    masks: dict[torch.device, torch.Tensor] = {}
    for grad in grads:
        values = local(stored_values(grad))
        if values.device not in masks:
            here = [flag.to(values.device, non_blocking=True) for flag in flags]
            masks[values.device] = torch.stack(here).amax() != 0
        values.masked_fill_(masks[values.device], 0.0)


def any_nonzero(values: Sequence[torch.Tensor]) -> bool:
    """Whether an element of ``values`` is not zero; waits for a device."""
    flags = [value.any() for value in values]
    return bool(torch.stack([flag.to(flags[0].device) for flag in flags]).any())


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
