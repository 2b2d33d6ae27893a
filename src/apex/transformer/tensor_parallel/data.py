"""A batch from the first rank of each tensor-parallel group to the others."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from apex.ops._check import ArgumentError
from apex.transformer import parallel_state

dist = torch.distributed


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, torch.Tensor] | None, datatype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Send tensors from the first rank of the tensor-parallel group to all its ranks.

    Args:
        keys: Names of the tensors to send, the same on all ranks.
        data: Dict from name to tensor on the group's first rank. Other ranks may pass ``None``.
        datatype: dtype of the tensors.

    Returns:
        Dict from name to a new tensor on the device of the process group.

    Raises:
        ArgumentError: A tensor is missing or has another dtype. All ranks of the group raise it.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    is_source = dist.get_rank() == source
    found: list[Any] = [_shapes(keys, data or {}, datatype) if is_source else None]
    dist.broadcast_object_list(found, source, group=group)
    if isinstance(found[0], str):
        raise ArgumentError(f"broadcast_data, on rank {source}: {found[0]}")

    shapes = [torch.Size(shape) for shape in found[0]]
    sizes = [shape.numel() for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=datatype, device=parallel_state.current_device())
    if is_source and data is not None:
        for piece, key in zip(torch.split(flat, sizes), keys, strict=True):
            piece.copy_(data[key].reshape(-1))
    dist.broadcast(flat, source, group=group)
    pieces = zip(keys, torch.split(flat, sizes), shapes, strict=True)
    return {key: piece.view(shape) for key, piece, shape in pieces}


def _check_data_types(
    keys: Sequence[str], data: Mapping[str, torch.Tensor], target_dtype: torch.dtype
) -> None:
    """Raise ``ArgumentError`` if a tensor is missing or has another dtype; programs call it."""
    found = _shapes(keys, data, target_dtype)
    if isinstance(found, str):
        raise ArgumentError(f"_check_data_types: {found}")


def _shapes(
    keys: Sequence[str], data: Mapping[str, torch.Tensor], datatype: torch.dtype
) -> list[tuple[int, ...]] | str:
    """Return the shapes, or what is wrong, so that all ranks can raise it."""
    for key in keys:
        kind = getattr(data.get(key), "dtype", type(data.get(key)).__name__)
        if kind != datatype:
            return f"data[{key!r}] is {kind}; pass a tensor of datatype, {datatype}."
    return [tuple(data[key].shape) for key in keys]
