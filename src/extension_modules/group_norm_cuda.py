"""Old name of NVIDIA's Apex: group normalization of channels-last images, forward and backward.

A module of compiled Apex. Arguments are positional only; any device and floating dtype. ``passes``,
how often the original read an image, is taken and not needed.
"""

import torch

from apex.ops._check import ArgumentError
from apex.ops.norms.group_norm import OP, check

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(
    input: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    passes: int,
    with_swish: bool,
    /,
) -> list[torch.Tensor]:
    """Compute ``[y, sums]``.

    ``sums``, float32 with two numbers for each image and group, is for ``backward`` alone: mean and
    reciprocal deviation, not the sums it is named after.
    """
    check("group_norm_cuda.forward", input, groups, weight, bias)
    y, stats = OP.operator(input, weight, bias, groups, eps, with_swish)
    return [y, stats.view(-1)]


@torch.no_grad()
def backward(
    grad_output: torch.Tensor,
    sums: torch.Tensor,
    input: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    passes: int,
    with_swish: bool,
    /,
) -> list[torch.Tensor]:
    """Compute the gradients of input, weight and bias; the latter are empty without weights."""
    check("group_norm_cuda.backward", input, groups, weight, bias)
    if grad_output.shape != input.shape or sums.numel() != 2 * input.shape[0] * groups:
        raise ArgumentError(
            f"group_norm_cuda.backward: grad_output has shape {tuple(grad_output.shape)} and there "
            f"are {sums.numel()} sums. Pass the input's shape, {tuple(input.shape)}, and the sums "
            "that forward returned."
        )
    stats = sums.view(input.shape[0], groups, 2)
    needs = [True, weight is not None, bias is not None]
    rest = (input, weight, bias, stats, groups, eps, with_swish)
    return list(OP.backward_operator(grad_output, needs, *rest))
