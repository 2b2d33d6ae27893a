"""Layer norm and RMS norm as functions, and as autograd functions that are called by ``.apply``."""

from typing import Any

import torch

from apex.ops._check import check_norm, refuse_other_dtype, refuse_wider_weight
from apex.ops._dtypes import NARROW, wide
from apex.ops.norms import row_norms
from apex.ops.norms._scripted import Shape, left_to_python
from apex.ops.norms.row_norms import MEMORY_EFFICIENT, OP


class _Affine(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        needs = ctx.needs_input_grad
        found = ctx.operation.gradients(ctx, grad_output, needs=needs[: ctx.tensors])
        return (*found[: ctx.tensors], *[None] * (len(needs) - ctx.tensors))


def _saved(
    ctx: Any,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: Shape,
    eps: float,
    memory_efficient: bool,
    *,
    centered: bool,
    tensors: int,
) -> torch.Tensor:
    """Compute a norm and save it for the backward of a function whose first are ``tensors``."""
    check_norm("layer_norm" if centered else "rms_norm", input, weight, bias, shape)
    dtype = input.dtype if weight is None else weight.dtype
    ctx.operation = MEMORY_EFFICIENT if memory_efficient else OP
    ctx.tensors = tensors
    rest = (dtype, input.dtype) if memory_efficient else (dtype,)
    args = (input, weight, bias, shape, eps, centered, *rest)
    y: torch.Tensor = ctx.operation.save_and_run(ctx, *args)
    return y


class FusedLayerNormAffineFunction(_Affine):
    """Layer norm with weight and bias, called by ``.apply``; see :func:`fused_layer_norm_affine`.

    Autocast does not matter here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        refuse_other_dtype(input, weight, "FusedLayerNormAffineMixedDtypesFunction")
        return _saved(
            ctx, input, weight, bias, normalized_shape, eps, memory_efficient, centered=True,
            tensors=3,
        )  # fmt: skip


class FusedLayerNormAffineMixedDtypesFunction(_Affine):
    """The same for a weight of any dtype, which is that of the output."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        return _saved(
            ctx, input, weight, bias, normalized_shape, eps, memory_efficient, centered=True,
            tensors=3,
        )  # fmt: skip


class FusedLayerNormFunction(_Affine):
    """Layer norm alone, called by ``.apply``; see :func:`fused_layer_norm`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        return _saved(
            ctx, input, None, None, normalized_shape, eps, memory_efficient, centered=True,
            tensors=1,
        )  # fmt: skip


class FusedRMSNormAffineFunction(_Affine):
    """RMS norm with a weight, called by ``.apply``; see :func:`fused_rms_norm_affine`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        refuse_wider_weight(input, weight, "FusedRMSNormAffineMixedDtypesFunction")
        return _saved(
            ctx, input, weight, None, normalized_shape, eps, memory_efficient, centered=False,
            tensors=2,
        )  # fmt: skip


class FusedRMSNormAffineMixedDtypesFunction(_Affine):
    """The same for a weight of any dtype, which is that of the output."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        return _saved(
            ctx, input, weight, None, normalized_shape, eps, memory_efficient, centered=False,
            tensors=2,
        )  # fmt: skip


class FusedRMSNormFunction(_Affine):
    """RMS norm alone, called by ``.apply``; see :func:`fused_rms_norm`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        return _saved(
            ctx, input, None, None, normalized_shape, eps, memory_efficient, centered=False,
            tensors=1,
        )  # fmt: skip


# -- functions -----------------------------------------------------------------------------------


def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer norm with weight and bias; the rest is in `apex.ops.norms.row_norms.layer_norm`.

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
    return _layer_norm(input, weight, bias, normalized_shape, eps, memory_efficient, False)


def fused_layer_norm(
    input: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer norm without weight and bias; see :func:`fused_layer_norm_affine`."""
    return _layer_norm(input, None, None, normalized_shape, eps, memory_efficient, False)


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer norm whose output has the weight's dtype; see :func:`fused_layer_norm_affine`."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, memory_efficient, True)


@left_to_python
def _layer_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: Shape,
    eps: float,
    memory_efficient: bool,
    mixed: bool,
) -> torch.Tensor:
    x, weight, bias = row_norms.OP.cast(input, weight, bias)
    if not mixed:
        refuse_other_dtype(x, weight, "mixed_dtype_fused_layer_norm_affine")
    dtype = None if weight is None else weight.dtype
    return row_norms.layer_norm(
        x, weight, bias, shape, eps, memory_efficient=memory_efficient, dtype=dtype
    )


def fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS norm with a weight; see :func:`apex.ops.norms.row_norms.rms_norm` for the rest.

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
    return _rms_norm(input, weight, normalized_shape, eps, memory_efficient, False)


def fused_rms_norm(
    input: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS norm without a weight; see :func:`fused_rms_norm_affine`."""
    return _rms_norm(input, None, normalized_shape, eps, memory_efficient, False)


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS norm with a weight of any dtype, which is the output's; see the function above."""
    return _rms_norm(input, weight, normalized_shape, eps, memory_efficient, True)


@left_to_python
def _rms_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    shape: Shape,
    eps: float,
    memory_efficient: bool,
    mixed: bool,
) -> torch.Tensor:
    x, weight = row_norms.OP.cast(input, weight)
    if not mixed:
        refuse_wider_weight(x, weight, "mixed_dtype_fused_rms_norm_affine")
    dtype = None if weight is None else weight.dtype
    return row_norms.rms_norm(x, weight, shape, eps, memory_efficient=memory_efficient, dtype=dtype)


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
