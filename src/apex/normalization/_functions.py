"""Layer norm and RMS norm as autograd functions, which programs call by ``.apply``."""

from typing import Any

import torch

from apex.ops import layer_norm as layer_norms
from apex.ops import rms_norm as rms_norms
from apex.ops._check import check_norm, refuse_other_dtype, refuse_wider_weight
from apex.ops._scripted import Shape


class _Affine(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = ctx.operation.gradients(ctx, *grads)
        count = len(ctx.needs_input_grad)
        return (*found[: ctx.tensors], *[None] * (count - ctx.tensors))


def _saved_layer_norm(
    ctx: Any,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: Shape,
    eps: float,
    memory_efficient: bool,
) -> torch.Tensor:
    check_norm("layer_norm", input, weight, bias, shape)
    dtype = input.dtype if weight is None else weight.dtype
    ctx.operation = layer_norms.MEMORY_EFFICIENT if memory_efficient else layer_norms.OP
    ctx.tensors = 1 if weight is None else 3
    rest = (dtype, input.dtype) if memory_efficient else (dtype,)
    y: torch.Tensor = ctx.operation.save_and_run(ctx, input, weight, bias, shape, eps, *rest)
    return y


def _saved_rms_norm(
    ctx: Any,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    shape: Shape,
    eps: float,
    memory_efficient: bool,
) -> torch.Tensor:
    check_norm("rms_norm", input, weight, None, shape)
    dtype = input.dtype if weight is None else weight.dtype
    ctx.operation = rms_norms.MEMORY_EFFICIENT if memory_efficient else rms_norms.OP
    ctx.tensors = 1 if weight is None else 2
    rest = (dtype, input.dtype) if memory_efficient else (dtype,)
    y: torch.Tensor = ctx.operation.save_and_run(ctx, input, weight, shape, eps, *rest)
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
        return _saved_layer_norm(ctx, input, weight, bias, normalized_shape, eps, memory_efficient)


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
        return _saved_layer_norm(ctx, input, weight, bias, normalized_shape, eps, memory_efficient)


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
        return _saved_layer_norm(ctx, input, None, None, normalized_shape, eps, memory_efficient)


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
        return _saved_rms_norm(ctx, input, weight, normalized_shape, eps, memory_efficient)


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
        return _saved_rms_norm(ctx, input, weight, normalized_shape, eps, memory_efficient)


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
        return _saved_rms_norm(ctx, input, None, normalized_shape, eps, memory_efficient)
