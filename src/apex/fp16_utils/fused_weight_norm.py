"""The autograd function of 2018 for weight norm; :mod:`apex.ops.norms.weight_norm` computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apex.ops.norms.weight_norm import weight_norm

__all__ = ["Fused_Weight_Norm", "check_contig_cuda"]


def check_contig_cuda(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Check that tensors are contiguous; on any device, though the original demanded CUDA.

    Args:
        tensors: What to check.
        names: The name of each, for the error.

    Raises:
        RuntimeError: One is not contiguous.

    Example:
        >>> check_contig_cuda([torch.ones(2, 3)], ["input"])
    """
    for tensor, name in zip(tensors, names, strict=True):
        if not tensor.is_contiguous():
            raise RuntimeError(f"{name} is not contiguous. Pass {name}.contiguous().")


class Fused_Weight_Norm(torch.autograd.Function):
    """``g * input / ||input||`` through :meth:`apply`.

    The original took contiguous CUDA tensors of one dtype, and for ``dim`` the first or the last
    dimension. Here any device, layout, dimension, negative dimension and None will do, ``g`` may
    have another dtype, and the result can be differentiated twice.

    Args:
        input: Any shape; float16, bfloat16, float32 or float64.
        g: The shape of ``input`` with ones in all dimensions but ``dim``; 0-dim with None.
        dim: The dimension whose indices have a norm each; None for one norm of all elements.

    Raises:
        IndexError: ``input`` has no dimension ``dim``.
        RuntimeError: A dtype or device is not taken, or ``g`` has another shape.

    Example:
        >>> v = torch.tensor([[3.0, 4.0]], requires_grad=True)
        >>> Fused_Weight_Norm.apply(v, torch.tensor([[10.0]])).tolist()
        [[6.0, 8.0]]
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, g: torch.Tensor, dim: int | None = 0
    ) -> torch.Tensor:
        """Compute the weight; see the class."""
        ctx.save_for_backward(input, g)
        ctx.dim = dim
        return weight_norm(input, g, dim)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of ``input`` and ``g``, each in the dtype of its tensor."""
        found = torch.func.vjp(lambda v, g: weight_norm(v, g, ctx.dim), *ctx.saved_tensors)
        pull_back = found[1]
        return (*pull_back(grad_output), None)
