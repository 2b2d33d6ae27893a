"""Division without remainder, and splitting tensors into equal parts for ranks."""

from typing import Any

import torch

from apex.ops import _runtime
from apex.ops._check import ArgumentError

__all__ = [
    "divide",
    "ensure_divisibility",
    "gather_split_1d_tensor",
    "split_tensor_into_1d_equal_chunks",
]


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise ``AssertionError`` unless ``numerator`` is a multiple of ``denominator``."""
    if denominator == 0 or numerator % denominator:
        raise AssertionError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator``. Raise ``AssertionError`` if it is not an integer."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_into_1d_equal_chunks(tensor: torch.Tensor, *, group: Any = None) -> torch.Tensor:
    """Return this rank's part of a flattened tensor, as a view if the tensor is contiguous.

    Args:
        tensor: Tensor of any shape.
        group: The ranks to split it over; by default all. Without ``torch.distributed`` only this
            process.

    Returns:
        1-dimensional tensor of ``tensor.numel() / world_size`` elements.

    Raises:
        AssertionError: The number of ranks does not divide the number of elements.
        ArgumentError: This process is not in the group.
    """
    size, rank = _size_and_rank(group)
    part = divide(tensor.numel(), size)
    return tensor.reshape(-1)[rank * part : (rank + 1) * part]


def gather_split_1d_tensor(tensor: torch.Tensor, *, group: Any = None) -> torch.Tensor:
    """Undo :func:`split_tensor_into_1d_equal_chunks`: join the parts of all ranks.

    No gradient flows through it.

    Args:
        tensor: This rank's part, of the same size on every rank.
        group: The ranks to gather from; by default all. Without ``torch.distributed`` only this
            process.

    Returns:
        A new 1-dimensional tensor.
    """
    size, _ = _size_and_rank(group)
    flat = tensor.detach().reshape(-1)
    if size == 1:
        return flat.clone()
    whole = flat.new_empty(size, flat.numel())
    torch.distributed.all_gather(list(whole.unbind()), flat, group=group)
    return whole.view(-1)


def device_type(backends: str | None = None) -> str:
    """Return the type of this machine's accelerator, or ``"cpu"``.

    Args:
        backends: Backends of a process group. If the backend of the accelerator is not among them,
            as in a program that uses only Gloo, the result is ``"cpu"``.
    """
    found = torch.accelerator.current_accelerator() if _runtime.has_accelerator() else None
    if found is None:
        return "cpu"
    usual = torch.distributed.get_default_backend_for_device(found.type)
    return found.type if backends is None or usual in backends else "cpu"


def _size_and_rank(group: Any) -> tuple[int, int]:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1, 0
    check_member("group", group)
    return distributed.get_world_size(group), distributed.get_rank(group)


def check_member(name: str, group: Any) -> None:
    """Raise ``ArgumentError`` unless this process is in a group.

    A collective of others only warns, or returns garbage.
    """
    if torch.distributed.get_rank(group) < 0:
        raise ArgumentError(
            f"{name}: rank {torch.distributed.get_rank()} is not in the group. Pass a group that "
            "contains it, as torch.distributed.new_group returns it to its members."
        )
