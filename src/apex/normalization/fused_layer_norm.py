"""Layer norm and RMS norm as modules, as functions and as autograd functions.

All of them run on any device; :mod:`apex.ops.norms.row_norms` holds the
definitions. What differs is the dtypes they take and give, outside of autocast:

=============================  ==================================  ======================
form                           weight of another dtype             output
=============================  ==================================  ======================
functions without ``mixed``    refused; 16-bit weights of an RMS   the weight's dtype
                               norm taken (T5 in half)
functions with ``mixed``       taken                               the weight's dtype
`FusedLayerNorm`               float32 with 16-bit input taken     the input's dtype
`FusedRMSNorm`                 taken                               the weight's dtype
`MixedFused...`                taken                               the weight's dtype
=============================  ==================================  ======================

Under autocast of the input's device everything but float64 is cast to autocast's dtype first, so
that the output has 16 bits, unlike that of ``torch.nn.LayerNorm``. The functions' default ``eps``
is 1e-6, the modules' 1e-5; both as in Apex.
"""

import numbers
import warnings
from typing import Any

import torch

from apex.normalization._fakes import (
    fused_layer_norm_affine_bwd_fake,
    fused_layer_norm_affine_fwd_fake,
    fused_layer_norm_bwd_fake,
    fused_layer_norm_fwd_fake,
    fused_rms_norm_affine_bwd_fake,
    fused_rms_norm_affine_fwd_fake,
    fused_rms_norm_bwd_fake,
    fused_rms_norm_fwd_fake,
    supports_custom_op,
)
from apex.normalization._functions import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    FusedRMSNormFunction,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)
from apex.ops.norms import _scripted
from apex.ops.norms._scripted import Shape
from apex.ops.norms.row_norms import norm

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_layer_norm_affine_bwd_fake",
    "fused_layer_norm_affine_fwd_fake",
    "fused_layer_norm_bwd_fake",
    "fused_layer_norm_fwd_fake",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "fused_rms_norm_affine_bwd_fake",
    "fused_rms_norm_affine_fwd_fake",
    "fused_rms_norm_bwd_fake",
    "fused_rms_norm_fwd_fake",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
    "supports_custom_op",
]

fused_layer_norm_cuda = None  # programs look whether the name is here; nothing is compiled


class _RowNorm(torch.nn.Module):
    """What the modules share: their parameters, ones and zeros at first, and sizes."""

    __constants__ = ["normalized_shape", "eps", "elementwise_affine", "memory_efficient", "_mixed"]
    _mixed = False  # whether the output has the weight's dtype, whatever the input's
    _parameter_names: tuple[str, ...] = ("weight",)
    normalized_shape: tuple[int, ...]
    eps: float
    elementwise_affine: bool
    memory_efficient: bool
    weight: torch.Tensor | None

    def __init__(
        self,
        normalized_shape: int | Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        alone = isinstance(normalized_shape, numbers.Integral)  # int, or one of numpy's
        sizes: Any = [int(normalized_shape)] if alone else normalized_shape  # type: ignore[arg-type]
        self.normalized_shape = shape = torch.Size(sizes)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name in self._parameter_names:
            empty = torch.empty(shape, device=device, dtype=dtype) if elementwise_affine else None
            self.register_parameter(name, None if empty is None else torch.nn.Parameter(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias, if there is one, to 0."""
        for name, parameter in self.named_parameters(recurse=False):
            torch.nn.init.constant_(parameter, float(name == "weight"))

    def extra_repr(self) -> str:
        """Show the sizes in ``print(model)``."""
        shape = tuple(self.normalized_shape)
        return f"{shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(_RowNorm):
    """Layer norm over the last dimensions, a drop-in for `torch.nn.LayerNorm`.

    Args:
        normalized_shape: The last dimensions of the input, or the last one alone.
        eps: Added to the variance.
        elementwise_affine: Whether there are a weight (ones at first) and a bias (zeros).
        memory_efficient: Keep the output for the backward, not the input.
        device: Of the parameters.
        dtype: Of the parameters.

    Example:
        >>> FusedLayerNorm(4)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([-1.3416, -0.4472,  0.4472,  1.3416], grad_fn=<NativeLayerNormBackward0>)
    """

    _parameter_names = ("weight", "bias")
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``(..., *normalized_shape)`` to the same shape."""
        weight, bias, shape, eps = self.weight, self.bias, self.normalized_shape, self.eps
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return _scripted.layer_norm(input, weight, bias, shape, eps, self._mixed)
        weights = "any" if self._mixed else "float32"
        return norm(
            input, weight, bias, shape, eps, self.memory_efficient, True, weights,
            "MixedFusedLayerNorm",
        )  # fmt: skip


class FusedRMSNorm(_RowNorm):
    """RMS norm over the last dimensions.

    Args:
        normalized_shape: The last dimensions of the input, or the last one alone.
        eps: Added to the mean square.
        elementwise_affine: Whether there is a weight (ones at first), whose dtype is the output's.
        memory_efficient: Keep the output for the backward, not the input.
        device: Of the weight.
        dtype: Of the weight.

    Example:
        >>> FusedRMSNorm(2, elementwise_affine=False)(torch.tensor([3.0, 4.0]))
        tensor([0.8485, 1.1314])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``(..., *normalized_shape)`` to the same shape."""
        weight, shape, eps = self.weight, self.normalized_shape, self.eps
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return _scripted.rms_norm(input, weight, shape, eps)
        return norm(input, weight, None, shape, eps, self.memory_efficient, False, "any", "")


class _AlwaysAffine(_RowNorm):
    _mixed = True

    def __init__(
        self,
        normalized_shape: int | Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        if not kwargs.get("elementwise_affine", True):
            raise RuntimeError(
                f"{name} always has a weight: elementwise_affine=False is not possible. "
                f"Use {name.removeprefix('Mixed')}."
            )
        if "elementwise_affine" in kwargs:
            said = f"{name} always has a weight: elementwise_affine is not needed"
            warnings.warn(said, stacklevel=2)
        super().__init__(normalized_shape, eps, True, memory_efficient, device=device, dtype=dtype)


class MixedFusedLayerNorm(_AlwaysAffine, FusedLayerNorm):
    """`FusedLayerNorm` whose output has the dtype of its parameters, whatever the input's.

    Args:
        normalized_shape: The last dimensions of the input, or the last one alone.
        eps: Added to the variance.
        memory_efficient: Keep the output for the backward, not the input.
        device: Of the parameters.
        dtype: Of the parameters.
        **kwargs: Passed over, as in Apex; ``elementwise_affine=False`` is refused.
    """


class MixedFusedRMSNorm(_AlwaysAffine, FusedRMSNorm):
    """`FusedRMSNorm` with a weight always; the output has its dtype.

    Args:
        normalized_shape: The last dimensions of the input, or the last one alone.
        eps: Added to the mean square.
        memory_efficient: Keep the output for the backward, not the input.
        device: Of the weight.
        dtype: Of the weight.
        **kwargs: Passed over, as in Apex; ``elementwise_affine=False`` is refused.
    """
