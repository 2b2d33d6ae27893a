"""Tensors: what gradients store, adding up, setting to zeros; looks that copy little memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from apex._compat import private
from apex.ops.lists.tensor_lists import OWN_MEMORY, local

_MOST = 2**18  # elements of a piece: what is copied of it stays in a processor's cache


def pieces(*tensors: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    """Views of equally shaped tensors, side by side, of at most 2**18 elements each."""
    first = tensors[0]
    if first.numel() <= _MOST or not OWN_MEMORY.issuperset(map(type, tensors)):
        yield tensors
        return
    rows = max(1, _MOST * len(first) // first.numel())
    for parts in zip(*[torch.split(tensor, rows) for tensor in tensors], strict=True):
        yield from pieces(*parts) if rows > 1 else pieces(*[part[0] for part in parts])


def is_rounded(weight: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether ``weight`` equals ``master``, rounded; waits for a device."""
    both = pieces(weight.detach(), master.detach())
    return all(_are_equal(part, other.to(part.dtype)) for part, other in both)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal`` of 16-bit tensors, but NaN equals NaN; four elements at a time if it can.

    On a CPU torch takes 3.9 ns for an element of float16 and 1.5 for one of bfloat16; for four as
    an int64 it takes 1.0.
    """
    both = one, other
    if all(x.is_contiguous() and x.numel() % 4 == x.storage_offset() % 4 == 0 for x in both):
        words = [x.reshape(-1).view(torch.int64) for x in both]
        if torch.equal(*words):
            return True
    if torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether the memory of ``tensor`` is all its own.

    Not that of a part of a larger tensor, of an expanded one, or of one that overlaps itself; nor
    what is shared between processes, mapped from a file or NumPy's; nor what another tensor has.
    """
    if type(tensor) not in OWN_MEMORY or tensor.layout != torch.strided:
        return False
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != size:
            return False
        size *= length
    storage = tensor.untyped_storage()
    if storage.nbytes() != size * tensor.element_size() or not storage.resizable():
        return False
    if private.storage_Use_Count is None or (not tensor.is_cuda and storage.is_shared()):
        return False
    new = torch.empty(1, dtype=torch.uint8, device="cpu")
    other = new.untyped_storage()
    owners: list[int] = [private.storage_Use_Count(one._cdata) for one in (storage, other)]
    return owners[0] == owners[1]


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
