"""Gradients as tensors: what they store, adding up, setting to zeros; nothing of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex._compat import private
from apex.ops.lists.tensor_lists import OWN_MEMORY, local


def stored_values(grad: torch.Tensor) -> torch.Tensor:
    """The elements that ``grad`` stores: all of a dense one, the given ones of a sparse one."""
    return grad.coalesce().values() if grad.is_sparse else grad


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
        private.foreach_add_(into, new)


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
