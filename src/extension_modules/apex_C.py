"""``apex_C``: a list of tensors as one, and back.

The name that compiled Apex had at the top level. Arguments are positional only, as there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._utils import _unflatten_dense_tensors

from apex.ops.multi_tensor import flattened

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[torch.Tensor], /) -> torch.Tensor:
    """Copy dense tensors one after the other into a 1-dimensional tensor; view one alone."""
    return flattened(list(tensors))


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
