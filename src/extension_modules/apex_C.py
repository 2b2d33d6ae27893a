"""Old name of NVIDIA's Apex: flattens a list of tensors, and splits it again.

A module of compiled Apex. Arguments are positional only.
"""

from collections.abc import Sequence

import torch

from apex.ops.lists import flat as _flat

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[torch.Tensor], /) -> torch.Tensor:
    """Copy dense tensors one after the other into a 1-dimensional tensor; view one alone."""
    return _flat.flatten(list(tensors))


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
    """View a 1-dimensional tensor as tensors of the shapes of ``tensors``.

    Raises:
        RuntimeError: ``flat`` has fewer elements than ``tensors`` together.
    """
    return _flat.unflatten(flat, list(tensors))
