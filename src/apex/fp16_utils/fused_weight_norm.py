"""The autograd function of 2018 for weight norm; :mod:`apex.ops.norms.weight_norm` computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apex.ops.norms.weight_norm import weight_norm

__all__ = ["Fused_Weight_Norm", "check_contig_cuda"]


def check_contig_cuda(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise ``RuntimeError`` if a tensor is not contiguous; any device will do."""
    for tensor, name in zip(tensors, names, strict=True):
        if not tensor.is_contiguous():
            raise RuntimeError(f"{name} is not contiguous. Pass {name}.contiguous().")


class Fused_Weight_Norm(torch.autograd.Function):
    """``Fused_Weight_Norm.apply(v, g, dim)`` is :func:`apex.ops.norms.weight_norm.weight_norm`.

    Example:
        >>> Fused_Weight_Norm.apply(torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0]])).tolist()
        [[6.0, 8.0]]
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, g: torch.Tensor, dim: int | None = 0
    ) -> torch.Tensor:
        """Return the weight."""
        ctx.save_for_backward(input, g)
        ctx.dim = dim
        return weight_norm(input, g, dim)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of ``input`` and ``g``, each in the dtype of its tensor."""
        found = torch.func.vjp(lambda v, g: weight_norm(v, g, ctx.dim), *ctx.saved_tensors)
        return (*found[1](grad_output), None)
