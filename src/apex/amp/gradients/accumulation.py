"""Adding gradients up: stashing them before a backward pass, and adding them back after it."""

from __future__ import annotations

import torch

from apex.ops.columns import OWN_MEMORY

Stash = dict[torch.Tensor, torch.Tensor]  # stashed gradients, by the tensor they belong to


def stored_values(grad: torch.Tensor) -> torch.Tensor:
    """The elements that ``grad`` stores: all of a dense one, the given ones of a sparse one."""
    return grad.coalesce().values() if grad.is_sparse else grad


def unshared(grad: torch.Tensor) -> torch.Tensor:
    """The gradient, copied if it is part of a bucket that the next backward may write to."""
    if grad.is_sparse or grad.untyped_storage().nbytes() <= grad.numel() * grad.element_size():
        return grad
    return grad.clone()


def coalesced(weight: torch.Tensor) -> torch.Tensor | None:
    """The gradient of ``weight``, which becomes a coalesced one if it is sparse."""
    grad = weight.grad
    if grad is not None and grad.is_sparse:
        weight.grad = grad = grad.coalesce()
    return grad


@torch.no_grad()
def accumulate(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each tensor its new gradient, on top of what it has accumulated."""
    into: list[torch.Tensor] = []
    new: list[torch.Tensor] = []
    for tensor, grad in pairs:
        now = tensor.grad
        if now is None:
            tensor.grad = grad
        elif grad.is_sparse or now.is_sparse:
            tensor.grad = now + grad
        elif not OWN_MEMORY.issuperset((type(now), type(grad))):
            now.add_(grad)  # DTensors, of any meshes and placements
        else:
            into.append(now)
            new.append(grad)
    if new:
        torch._foreach_add_(into, new)
