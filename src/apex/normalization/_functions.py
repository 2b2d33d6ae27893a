"""Layer norm and RMS norm as autograd functions, which programs call by ``.apply``."""

from typing import Any

import torch

from apex.ops._check import check_norm, refuse_other_dtype, refuse_wider_weight
from apex.ops._scripted import Shape
from apex.ops.row_norms import MEMORY_EFFICIENT, OP


class _Affine(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad
        found = ctx.operation.gradients(ctx, *grads, needs=needs[: ctx.tensors])
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
