"""The autograd function of 2018 for weight norm; :mod:`apex.ops.norms.weight_norm` computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex.ops._function import Applied
from apex.ops.norms.weight_norm import weight_norm


def check_contig_cuda(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise ``RuntimeError`` if a tensor is not contiguous; any device will do."""
    for tensor, name in zip(tensors, names, strict=True):
        if not tensor.is_contiguous():
            raise RuntimeError(f"{name} is not contiguous. Pass {name}.contiguous().")


def _weight_norm(input: torch.Tensor, g: torch.Tensor, dim: int | None = 0) -> torch.Tensor:
    return weight_norm(input, g, dim)


class Fused_Weight_Norm(Applied):
    """Weight norm: ``Fused_Weight_Norm.apply(v, g, dim)`` computes ``g * v / ||v||``.

    Example:
        >>> Fused_Weight_Norm.apply(torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0]])).tolist()
        [[6.0, 8.0]]
    """

    function = staticmethod(_weight_norm)
