"""Gradients as tensors: stashing, adding up, clearing."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

from apex.ops.lists.columns import OWN_MEMORY

Stash = dict[torch.Tensor, torch.Tensor]  # stashed gradients, by the tensor they belong to

IS_SPARSE = operator.attrgetter("is_sparse")


def stored_values(grad: torch.Tensor) -> torch.Tensor:
    """The elements that ``grad`` stores: all of a dense one, the given ones of a sparse one."""
    return grad.coalesce().values() if grad.is_sparse else grad


def unshared(grad: torch.Tensor) -> torch.Tensor:
    """The gradient, copied if it is part of a bucket that the next backward may write to."""
    if grad.is_sparse or grad.untyped_storage().nbytes() <= grad.numel() * grad.element_size():
        return grad
    return grad.clone()


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


def any_nonzero(values: Sequence[torch.Tensor]) -> bool:
    """Whether an element of ``values`` is not zero; waits for a device."""
    flags = [value.any() for value in values]
    return bool(torch.stack([flag.to(flags[0].device) for flag in flags]).any())
