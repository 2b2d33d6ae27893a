"""``apex_C``: a list of tensors as one, and back.

The name that compiled Apex had at the top level. Arguments are positional only, as there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch._utils import _unflatten_dense_tensors

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[torch.Tensor], /) -> torch.Tensor:
    """Copy dense tensors one after the other into a 1-dimensional tensor; view one alone."""
    tensors = list(tensors)
    kind = tensors[0].device.type if tensors else "cpu"
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    # autocast refuses to join tensors of the other 16-bit type
    with torch.autocast(kind, enabled=False) if casts else contextlib.nullcontext():
        flat: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return flat


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
    """View a one-dimensional tensor as tensors of the shapes of ``tensors``.

    Raises:
        RuntimeError: ``flat`` has fewer elements than ``tensors`` together.
    """
    tensors = list(tensors)
    wanted = sum(tensor.numel() for tensor in tensors)
    if flat.numel() < wanted:
        raise RuntimeError(f"unflatten needs {wanted} elements; flat has {flat.numel()}.")
    return list(_unflatten_dense_tensors(flat, tensors))  # type: ignore[no-untyped-call]
