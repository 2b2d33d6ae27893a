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
    _rms_norm,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)
from apex.ops._check import refuse_other_dtype
from apex.ops._dtypes import NARROW
from apex.ops.norms import _scripted, row_norms
from apex.ops.norms._scripted import Shape

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


# -- modules -------------------------------------------------------------------------------------


class FusedLayerNorm(torch.nn.Module):
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

    __constants__ = ["normalized_shape", "eps", "elementwise_affine", "memory_efficient", "_mixed"]
    _mixed = False  # whether the output has the weight's dtype
    normalized_shape: tuple[int, ...]
    eps: float
    elementwise_affine: bool
    memory_efficient: bool
    weight: torch.Tensor | None
    bias: torch.Tensor | None

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
        _set_up(self, normalized_shape, eps, elementwise_affine, memory_efficient)
        shape = self.normalized_shape
        for name in ("weight", "bias"):
            empty = torch.empty(shape, device=device, dtype=dtype) if elementwise_affine else None
            self.register_parameter(name, None if empty is None else torch.nn.Parameter(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        if self.elementwise_affine:
            torch.nn.init.ones_(self.weight)  # type: ignore[arg-type]
            torch.nn.init.zeros_(self.bias)  # type: ignore[arg-type]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``(..., *normalized_shape)`` to the same shape."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return _scripted.layer_norm(
                input, self.weight, self.bias, self.normalized_shape, self.eps, self._mixed
            )
        return self._normalized(input)

    @torch.jit.unused
    def _normalized(self, input: torch.Tensor) -> torch.Tensor:
        x, weight, bias = row_norms.OP.cast(input, self.weight, self.bias)
        if weight is not None and not (x.dtype in NARROW and weight.dtype == torch.float32):
            refuse_other_dtype(x, weight, "MixedFusedLayerNorm")
        return row_norms.layer_norm(
            x, weight, bias, self.normalized_shape, self.eps, memory_efficient=self.memory_efficient
        )

    def extra_repr(self) -> str:
        """Show the sizes in ``print(model)``."""
        return _repr(self)


class FusedRMSNorm(torch.nn.Module):
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

    __constants__ = ["normalized_shape", "eps", "elementwise_affine", "memory_efficient"]
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
        _set_up(self, normalized_shape, eps, elementwise_affine, memory_efficient)
        weight = None
        if elementwise_affine:
            weight = torch.nn.Parameter(
                torch.empty(self.normalized_shape, device=device, dtype=dtype)
            )
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        if self.elementwise_affine:
            torch.nn.init.ones_(self.weight)  # type: ignore[arg-type]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``(..., *normalized_shape)`` to the same shape."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return _scripted.rms_norm(input, self.weight, self.normalized_shape, self.eps)
        return self._normalized(input)

    @torch.jit.unused
    def _normalized(self, input: torch.Tensor) -> torch.Tensor:
        shape, eps = self.normalized_shape, self.eps
        return _rms_norm(input, self.weight, shape, eps, self.memory_efficient, True)

    def extra_repr(self) -> str:
        """Show the sizes in ``print(model)``."""
        return _repr(self)


class MixedFusedLayerNorm(FusedLayerNorm):
    """`FusedLayerNorm` whose output has the dtype of its parameters, whatever the input's.

    Args:
        normalized_shape: The last dimensions of the input, or the last one alone.
        eps: Added to the variance.
        memory_efficient: Keep the output for the backward, not the input.
        device: Of the parameters.
        dtype: Of the parameters.
        **kwargs: Passed over, as in Apex; ``elementwise_affine=False`` is refused.
    """

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
        _always_affine("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient, device=device, dtype=dtype)

    @torch.jit.unused
    def _normalized(self, input: torch.Tensor) -> torch.Tensor:
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
        )  # fmt: skip


class MixedFusedRMSNorm(FusedRMSNorm):
    """`FusedRMSNorm` with a weight always; the output has its dtype.

    Args:
        normalized_shape: The last dimensions of the input, or the last one alone.
        eps: Added to the mean square.
        memory_efficient: Keep the output for the backward, not the input.
        device: Of the weight.
        dtype: Of the weight.
        **kwargs: Passed over, as in Apex; ``elementwise_affine=False`` is refused.
    """

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
        _always_affine("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient, device=device, dtype=dtype)


def _always_affine(name: str, kwargs: dict[str, Any]) -> None:
    if "elementwise_affine" not in kwargs:
        return
    if not kwargs["elementwise_affine"]:
        raise RuntimeError(
            f"{name} always has a weight: elementwise_affine=False is not possible. "
            f"Use {name.removeprefix('Mixed')}."
        )
    warnings.warn(f"{name} always has a weight: elementwise_affine is not needed", stacklevel=3)


def _set_up(
    module: Any, shape: int | Shape, eps: float, elementwise_affine: bool, memory_efficient: bool
) -> None:
    alone = isinstance(shape, numbers.Integral)  # int, or one of numpy's
    module.normalized_shape = torch.Size([int(shape)] if alone else shape)  # type: ignore[arg-type]
    module.eps = eps
    module.elementwise_affine = elementwise_affine
    module.memory_efficient = memory_efficient


def _repr(module: Any) -> str:
    shape, eps = tuple(module.normalized_shape), module.eps
    return f"{shape}, eps={eps}, elementwise_affine={module.elementwise_affine}"
