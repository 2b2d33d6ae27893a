"""Softmax of attention scores with a scale and a mask, as Megatron-style programs call it.

All functions compute in float32 and round once. A masked score becomes -10000, and a fully masked
row becomes zeros. They support any number of queries and keys, any device and every floating dtype.
"""

# Annotations are no strings here: TorchScript would not find their names.

import functools
from collections.abc import Callable
from typing import Any

import torch

from apex.ops._check import FLOATS, ArgumentError
from apex.ops._dtypes import WIDE, Optional
from apex.ops._function import Applied
from apex.ops._runtime import TENSOR_TYPES
from apex.ops.layers import scaled_softmax as ops
from apex.ops.norms._scripted import left_to_python
from apex.transformer.enums import AttnMaskType

__all__ = [
    "FusedScaleMaskSoftmax",
    "GenericFusedScaleMaskSoftmax",
    "GenericScaledMaskedSoftmax",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "generic_scaled_masked_softmax",
    "scaled_masked_softmax",
    "scaled_upper_triang_masked_softmax",
]

MaskFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@left_to_python
def scaled_masked_softmax(inputs: torch.Tensor, mask: Optional, scale: float) -> torch.Tensor:
    """Compute the softmax of ``scale * inputs`` over the last dimension, without masked keys.

    Under ``torch.autocast`` the inputs are cast to its dtype.

    Args:
        inputs: ``(batch, heads, queries, keys)`` in float16, bfloat16, float32 or float64.
        mask: ``(batch, 1, queries, keys)``, where any size may be 1. A bool mask hides keys that
            are True, a uint8 mask those that are 1. ``None`` masks nothing.
        scale: A number.

    Returns:
        Tensor of the shape and dtype of the inputs. A row is zero if all its keys are masked, or if
        no score is above -10000.

    Raises:
        ArgumentError: An argument has an unsupported type, dtype, shape or device. It is a
            RuntimeError, TypeError and ValueError.

    Example:
        >>> scores, mask = torch.randn(2, 4, 8, 8), torch.rand(2, 1, 8, 8) < 0.3
        >>> scaled_masked_softmax(scores, mask, 0.125).shape
        torch.Size([2, 4, 8, 8])
    """
    return ops.scaled_softmax(inputs, mask, scale, name="scaled_masked_softmax")


generic_scaled_masked_softmax = scaled_masked_softmax  # Apex: kernels for any number of keys


@left_to_python
def scaled_upper_triang_masked_softmax(inputs: torch.Tensor, _: Any, scale: float) -> torch.Tensor:
    """Compute the causal softmax of ``scale * inputs``: the result is 0 above the diagonal.

    Args:
        inputs: ``(..., queries, keys)``, with as many queries as keys.
        _: Ignored.
        scale: A number.

    See :func:`scaled_masked_softmax` for dtypes and errors.
    """
    name = "scaled_upper_triang_masked_softmax"
    return ops.scaled_softmax(inputs, None, scale, causal=True, name=name)


class ScaledMaskedSoftmax(Applied):
    """Autograd function of :func:`scaled_masked_softmax`, which autocast does not cast.

    Call ``ScaledMaskedSoftmax.apply(inputs, mask, scale)``.
    """

    function = staticmethod(scaled_masked_softmax)
    gradient = "output_grads"


GenericScaledMaskedSoftmax = ScaledMaskedSoftmax


@left_to_python
def _scaled_softmax(inputs: torch.Tensor, scale: float) -> torch.Tensor:
    return scaled_masked_softmax(inputs, None, scale)


class ScaledSoftmax(Applied):
    """:class:`ScaledMaskedSoftmax` without a mask. Call ``ScaledSoftmax.apply(inputs, scale)``."""

    function = staticmethod(_scaled_softmax)
    gradient = "output_grads"


@left_to_python
def _causal_softmax(inputs: torch.Tensor, scale: float) -> torch.Tensor:
    return scaled_upper_triang_masked_softmax(inputs, None, scale)


class ScaledUpperTriangMaskedSoftmax(Applied):
    """Autograd function of :func:`scaled_upper_triang_masked_softmax`.

    Call ``ScaledUpperTriangMaskedSoftmax.apply(inputs, scale)``.
    """

    function = staticmethod(_causal_softmax)
    gradient = "output_grads"


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Scale, mask and softmax of attention scores.

    As in Apex, :meth:`is_kernel_available` decides what applies the mask: one of this module's
    functions, or your ``mask_func``. The results are equal if ``mask_func`` fills with -10000. A
    ``causal`` layer always hides later keys from each query, in addition to the mask.

    Args:
        input_in_fp16: Whether scores are float16.
        input_in_bf16: Whether scores are bfloat16. At most one of the two may be true.
        attn_mask_type: ``AttnMaskType.padding`` or ``AttnMaskType.causal``.
        scaled_masked_softmax_fusion: Whether the layer may use this module's functions.
        mask_func: Function ``mask_func(scores, mask)`` that returns masked scores. It receives
            float32 scores (float64 for float64).
        softmax_in_fp32: Must be true if you pass a scale. The softmax is always float32.
        scale: A number, or ``None`` for 1.

    Raises:
        RuntimeError: Both dtypes are true, or there is a scale without ``softmax_in_fp32``.
        ValueError: ``attn_mask_type`` is unknown.
    """

    __jit_ignored_attributes__ = ("attn_mask_type", "mask_func")  # TorchScript leaves us to Python

    def __init__(
        self, input_in_fp16: bool, input_in_bf16: bool, attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool, mask_func: MaskFunction | None,
        softmax_in_fp32: bool, scale: float | None,
    ) -> None:  # fmt: skip
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise RuntimeError(
                "both fp16 and bf16 flags cannot be active at the same time: pass True for one of "
                "input_in_fp16 and input_in_bf16, or for none."
            )
        if scale is not None and not softmax_in_fp32:
            raise RuntimeError(
                f"softmax should be in fp32 when scaled: scale is {scale}; pass "
                "softmax_in_fp32=True, or scale=None."
            )
        if attn_mask_type not in (AttnMaskType.padding, AttnMaskType.causal):
            raise ValueError(
                f"Invalid attn_mask_type {attn_mask_type!r}: pass AttnMaskType.padding or "
                "AttnMaskType.causal."
            )
        self.input_in_fp16, self.input_in_bf16 = input_in_fp16, input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type, self._causal = attn_mask_type, attn_mask_type == AttnMaskType.causal
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func, self.softmax_in_fp32, self.scale = mask_func, softmax_in_fp32, scale

    @functools.cached_property
    def input_in_float16(self) -> bool:
        """Whether scores have 16 bits."""
        return self.input_in_fp16 or self.input_in_bf16

    @functools.cached_property
    def _causal(self) -> bool:
        return self.attn_mask_type == AttnMaskType.causal

    @left_to_python
    def forward(self, input: torch.Tensor, mask: Optional) -> torch.Tensor:
        """Compute the softmax.

        Args:
            input: Scores, ``(batch, heads, queries, keys)``.
            mask: A mask for :func:`scaled_masked_softmax` or ``mask_func``, or ``None``.

        Returns:
            Tensor of the shape and dtype of the scores, or in autocast's dtype.
        """
        if not isinstance(input, torch.Tensor) or input.dim() != 4:
            ops.check(type(self).__name__, input)
            raise ArgumentError(
                f"{type(self).__name__}: input has shape {list(input.shape)}; pass (batch, heads, "
                "queries, keys)."
            )
        if self.is_kernel_available(mask, *input.shape):
            return self.forward_fused_softmax(input, mask)
        return self.forward_torch_softmax(input, mask)

    @left_to_python
    def is_kernel_available(self, mask: Optional, b: int, np: int, sq: int, sk: int) -> bool:
        """Return whether Apex had a kernel for a shape. If so, ``mask_func`` is not called."""
        causal = self._causal
        if not (self.scaled_masked_softmax_fusion and self.input_in_float16):
            return False
        if (mask is None and not causal) or (causal and sq != sk):
            return False
        if not 16 < sk <= 16384 or sq % 4 or sk % 4 or b * np % 4:
            return False
        return (b * np if causal else sq) % ops.batches_per_block(sk) == 0

    @left_to_python
    def forward_fused_softmax(self, input: torch.Tensor, mask: Optional) -> torch.Tensor:
        """Compute the softmax without ``mask_func``."""
        scale = 1.0 if self.scale is None else self.scale
        return ops.scaled_softmax(input, mask, scale, self._causal, name=type(self).__name__)

    @left_to_python
    def forward_torch_softmax(self, input: torch.Tensor, mask: Optional) -> torch.Tensor:
        """Compute the softmax with ``mask_func``."""
        name = type(self).__name__
        if type(input) not in TENSOR_TYPES or input.dtype not in FLOATS or input.dim() < 2:
            ops.check(name, input)
        queries, keys = input.shape[-2:]
        # A single query sees all keys; of several, fewer than keys, a mask has to say what they do.
        hides = self._causal and queries > 1 and (mask is None or queries == keys)
        scale = 1.0 if self.scale is None else self.scale
        if mask is None or self.mask_func is None:
            return ops.scaled_softmax(input, mask, scale, hides, name=name)
        (x,) = ops.OP.cast(input)
        z = self.mask_func((x if x.dtype in WIDE else x.float()) * scale, mask)
        if getattr(z, "shape", None) != x.shape:
            found = list(z.shape) if isinstance(z, torch.Tensor) else type(z).__name__
            raise ArgumentError(
                f"{name}: mask_func returned {found} for scores {list(x.shape)}; return masked "
                "scores of the same shape."
            )
        return ops.softmax(z, hides, True).to(x.dtype)

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """Return how many rows a block of Apex's kernel processed, for ``sk`` keys."""
        return ops.batches_per_block(sk)


class GenericFusedScaleMaskSoftmax(FusedScaleMaskSoftmax):
    """:class:`FusedScaleMaskSoftmax` for padding masks, without the rule about shapes."""

    def __init__(
        self, input_in_fp16: bool, input_in_bf16: bool, scaled_masked_softmax_fusion: bool,
        mask_func: MaskFunction | None, softmax_in_fp32: bool, scale: float | None,
    ) -> None:  # fmt: skip
        super().__init__(
            input_in_fp16, input_in_bf16, AttnMaskType.padding, scaled_masked_softmax_fusion,
            mask_func, softmax_in_fp32, scale,
        )  # fmt: skip

    @left_to_python
    def is_kernel_available(self, mask: Optional, b: int, np: int, sq: int, sk: int) -> bool:
        """Return ``scaled_masked_softmax_fusion``: whether the layer avoids ``mask_func``."""
        return self.scaled_masked_softmax_fusion and sk > 0
