"""Layer norm and RMS norm as functions, and as autograd functions that are called by ``.apply``."""

import torch

from apex.ops._dtypes import NARROW, wide
from apex.ops._function import Applied
from apex.ops.norms._scripted import Shape, left_to_python
from apex.ops.norms.row_norms import norm


def fused_layer_norm_affine(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
    normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Layer norm with weight and bias; :mod:`apex.ops.norms.row_norms` has the formula.

    Args:
        input: ``(..., *normalized_shape)``.
        weight: ``normalized_shape``, in the input's dtype; or ``None``.
        bias: The same.
        normalized_shape: The last dimensions of the input, a sequence.
        eps: Added to the variance.
        memory_efficient: Keep the output for the backward, not the input.

    Returns:
        ``(..., *normalized_shape)``, in the input's dtype.

    Raises:
        RuntimeError: Dtypes differ outside of autocast, or shapes do not fit.
    """
    instead = "mixed_dtype_fused_layer_norm_affine"
    return norm(
        input, weight, bias, normalized_shape, eps, memory_efficient, True, "same", instead
    )  # fmt: skip


def fused_layer_norm(
    input: torch.Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Layer norm without weight and bias; see :func:`fused_layer_norm_affine`."""
    return norm(input, None, None, normalized_shape, eps, memory_efficient, True, "any", "")


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
    normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Layer norm whose output has the weight's dtype; see :func:`fused_layer_norm_affine`."""
    return norm(input, weight, bias, normalized_shape, eps, memory_efficient, True, "any", "")


def fused_rms_norm_affine(
    input: torch.Tensor, weight: torch.Tensor | None, normalized_shape: Shape, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:  # fmt: skip
    """RMS norm with a weight; :mod:`apex.ops.norms.row_norms` has the formula.

    Args:
        input: ``(..., *normalized_shape)``.
        weight: ``normalized_shape``, in the input's dtype or in 16 bits; or ``None``.
        normalized_shape: The last dimensions of the input, a sequence.
        eps: Added to the mean square.
        memory_efficient: Keep the output for the backward, not the input.

    Returns:
        ``(..., *normalized_shape)``, in the weight's dtype.

    Raises:
        RuntimeError: A 16-bit input with a wider weight outside of autocast, or shapes that do not
            fit.
    """
    instead = "mixed_dtype_fused_rms_norm_affine"
    return norm(
        input, weight, None, normalized_shape, eps, memory_efficient, False, "half", instead
    )  # fmt: skip


def fused_rms_norm(
    input: torch.Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """RMS norm without a weight; see :func:`fused_rms_norm_affine`."""
    return norm(input, None, None, normalized_shape, eps, memory_efficient, False, "any", "")


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor, weight: torch.Tensor | None, normalized_shape: Shape, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:  # fmt: skip
    """RMS norm with a weight of any dtype, which is the output's; see the function above."""
    return norm(input, weight, None, normalized_shape, eps, memory_efficient, False, "any", "")


@left_to_python
def manual_rms_norm(
    input: torch.Tensor, normalized_shape: Shape, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """RMS norm in plain PyTorch, with the roundings of Apex's; note the order of the arguments.

    Args:
        input: ``(..., *normalized_shape)``.
        normalized_shape: The last dimensions of the input.
        weight: ``normalized_shape``, or ``None``.
        eps: Added to the mean square.

    Returns:
        ``(..., *normalized_shape)``: in at least float32 without a weight; with a 16-bit weight in
        its dtype, rounded before it is multiplied and after.
    """
    dims = tuple(range(-len(normalized_shape), 0))
    to = wide(input)
    y = input * torch.rsqrt(input.to(to).square().mean(dims, keepdim=True) + eps)
    if weight is None:
        return y
    return weight * (y.to(weight.dtype) if weight.dtype in NARROW else y)


# -- autograd functions; autocast does not matter to ``.apply`` ------------------------------------


class FusedLayerNormAffineFunction(Applied):
    """:func:`fused_layer_norm_affine`, called by ``.apply``."""

    function = staticmethod(fused_layer_norm_affine)


class FusedLayerNormAffineMixedDtypesFunction(Applied):
    """:func:`mixed_dtype_fused_layer_norm_affine`, called by ``.apply``."""

    function = staticmethod(mixed_dtype_fused_layer_norm_affine)


class FusedLayerNormFunction(Applied):
    """:func:`fused_layer_norm`, called by ``.apply``."""

    function = staticmethod(fused_layer_norm)


class FusedRMSNormAffineFunction(Applied):
    """:func:`fused_rms_norm_affine`, called by ``.apply``."""

    function = staticmethod(fused_rms_norm_affine)


class FusedRMSNormAffineMixedDtypesFunction(Applied):
    """:func:`mixed_dtype_fused_rms_norm_affine`, called by ``.apply``."""

    function = staticmethod(mixed_dtype_fused_rms_norm_affine)


class FusedRMSNormFunction(Applied):
    """:func:`fused_rms_norm`, called by ``.apply``."""

    function = staticmethod(fused_rms_norm)
