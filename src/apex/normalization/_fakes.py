"""Outputs by shape alone: names that Apex's module has beside its custom operators.

The operators here are ``apex::row_norm`` and its backward, with shape functions of their own; these
are for programs that call the old names.
"""

import math
from collections.abc import Sequence

import torch

Tensor = torch.Tensor
Shape = Sequence[int]


def supports_custom_op() -> bool:
    """Whether torch can register operators: always."""
    return True


def _statistics(input: Tensor, normalized_shape: Shape) -> Tensor:
    rows = math.prod(input.shape[: input.dim() - len(normalized_shape)])
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    return input.new_empty(rows, dtype=dtype)


def fused_rms_norm_fwd_fake(
    input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
) -> tuple[Tensor, ...]:
    """Output and inverse root mean square."""
    return torch.empty_like(input), _statistics(input, normalized_shape)


def fused_rms_norm_affine_fwd_fake(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Output and inverse root mean square."""
    return fused_rms_norm_fwd_fake(input, normalized_shape, eps)


def fused_layer_norm_fwd_fake(
    input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
) -> tuple[Tensor, ...]:
    """Output, mean and inverse deviation."""
    y, mean = fused_rms_norm_fwd_fake(input, normalized_shape, eps)
    return y, mean, torch.empty_like(mean)


def fused_layer_norm_affine_fwd_fake(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Shape, eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Output, mean and inverse deviation."""
    return fused_layer_norm_fwd_fake(input, normalized_shape, eps)


def fused_layer_norm_bwd_fake(
    grad_output: Tensor, mean: Tensor | None, invvar: Tensor, input_or_output: Tensor,
    normalized_shape: Shape, eps: float, memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """Gradient of the input."""
    return torch.empty_like(input_or_output)


def fused_layer_norm_affine_bwd_fake(
    grad_output: Tensor, mean: Tensor | None, invvar: Tensor, input_or_output: Tensor,
    normalized_shape: Shape, weight: Tensor, bias: Tensor, eps: float,
    memory_efficient: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of input, weight and bias."""
    return torch.empty_like(input_or_output), torch.empty_like(weight), torch.empty_like(bias)


def fused_rms_norm_bwd_fake(
    grad_output: Tensor, invvar: Tensor, input_or_output: Tensor, normalized_shape: Shape,
    eps: float, memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """Gradient of the input."""
    return torch.empty_like(input_or_output)


def fused_rms_norm_affine_bwd_fake(
    grad_output: Tensor, invvar: Tensor, input_or_output: Tensor, normalized_shape: Shape,
    weight: Tensor, eps: float, memory_efficient: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of input and weight."""
    return torch.empty_like(input_or_output), torch.empty_like(weight)
