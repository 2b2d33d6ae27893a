"""A list of tensors as one: flat copies, and one collective for many tensors.

Collectives are ``torch.distributed``'s; nothing here imports it before a process group exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import torch

from apex._compat import private

__all__ = ["broadcast", "by_kind", "flatten", "group_by_size", "unflatten"]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy dense tensors one after the other into a 1-dimensional tensor; view one alone."""
    kind = tensors[0].device.type if tensors else "cpu"
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    # autocast refuses to join tensors of the other 16-bit type
    with torch.autocast(kind, enabled=False) if casts else contextlib.nullcontext():
        flat: torch.Tensor = private.flatten_dense_tensors(list(tensors))
    return flat


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """View a 1-dimensional tensor as tensors of the shapes of ``tensors``.

    Raises:
        RuntimeError: ``flat`` has fewer elements than ``tensors`` together.
    """
    wanted = sum(tensor.numel() for tensor in tensors)
    if flat.numel() < wanted:
        raise RuntimeError(f"unflatten needs {wanted} elements; flat has {flat.numel()}.")
    views = private.unflatten_dense_tensors(flat, tensors)
    # torch 2.9 gives views without elements the shape (0,).
    return [
        view if view.numel() else view.view(tensor.shape)
        for view, tensor in zip(views, tensors, strict=True)
    ]


def by_kind(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by dtype and device, in the order in which these first appear."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def group_by_size(
    order: Sequence[int],
    params: Sequence[torch.Tensor],
    size: int,
    last: Collection[int] = (),
) -> list[list[int]]:
    """Group indices of tensors into buckets of one dtype and device, in the given order.

    Args:
        order: The indices.
        params: The tensors.
        size: Elements that a full bucket has at least.
        last: Indices that end a bucket each, instead of ``size``.
    """
    full, growing, sizes = [], dict[Any, list[int]](), dict[Any, int]()
    for index in order:
        kind = params[index].dtype, params[index].device
        growing.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + params[index].numel()
        if index in last if last else sizes[kind] >= size:
            full.append(growing.pop(kind))
            sizes[kind] = 0
    return [*full, *growing.values()]


@torch.no_grad()
def broadcast(tensors: Sequence[torch.Tensor], group: Any = None) -> None:
    """Overwrite ``tensors`` with those of the first rank of ``group``, flat, dtype by dtype.

    Values are written through ``.data``: a graph that has saved a tensor is not invalidated.

    Args:
        tensors: Dense; of the same shapes, dtypes and order on every rank.
        group: A process group; ``None`` is the default one.
    """
    world: Any = torch.distributed.group.WORLD
    source = torch.distributed.get_global_rank(group or world, 0)
    for alike in by_kind([tensor.data for tensor in tensors]):
        flat = flatten(alike)
        torch.distributed.broadcast(flat, source, group=group)
        private.foreach_copy_(alike, unflatten(flat, alike))
