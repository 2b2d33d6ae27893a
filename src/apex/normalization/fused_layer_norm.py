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

import math
import numbers
import warnings
from typing import Any

import torch

from apex.ops._dtypes import NARROW, wide
from apex.ops._function import Applied
from apex.ops.norms import _scripted
from apex.ops.norms._scripted import Shape, left_to_python
from apex.ops.norms.row_norms import norm

fused_layer_norm_cuda = None  # programs look whether the name is here; nothing is compiled


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
    """RMS norm with a weight, in whose dtype is the output; see :func:`fused_layer_norm_affine`.

    ``eps`` is added to the mean square. The weight has the input's dtype or 16 bits; outside of
    autocast a wider weight than a 16-bit input is a RuntimeError.
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


# -- modules --------------------------------------------------------------------------------------


class _RowNorm(torch.nn.Module):
    """What the modules share: their parameters, ones and zeros at first, and sizes."""

    __constants__ = ["normalized_shape", "eps", "elementwise_affine", "memory_efficient", "_mixed"]
    _mixed = False  # whether the output has the weight's dtype, whatever the input's
    _parameter_names: tuple[str, ...] = ("weight",)
    normalized_shape: tuple[int, ...]
    weight: torch.Tensor | None
    # What modules that an older Apex pickled whole may lack.
    eps: float = 1e-5
    elementwise_affine: bool = True
    memory_efficient: bool = False

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

    The output has the input's dtype. The weight must be float32 or have the input's dtype.

    Args:
        normalized_shape: Sizes of the last dimensions of the input, or the size of the last one.
        eps: Added to the variance.
        elementwise_affine: Whether to have a weight (initially 1) and a bias (initially 0).
        memory_efficient: Keep the output for the backward pass instead of the input.
        device: Device of the parameters.
        dtype: dtype of the parameters.

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
    """RMS norm over the last dimensions. With a weight the output has the weight's dtype.

    The arguments are those of `FusedLayerNorm`, but ``eps`` is added to the mean square, and there
    is no bias.

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
                f"{name} always has a weight, so elementwise_affine=False is not possible. Use "
                f"{name.removeprefix('Mixed')}."
            )
        if "elementwise_affine" in kwargs:
            said = f"{name} always has a weight, so elementwise_affine is not needed"
            warnings.warn(said, stacklevel=2)
        super().__init__(normalized_shape, eps, True, memory_efficient, device=device, dtype=dtype)


class MixedFusedLayerNorm(_AlwaysAffine, FusedLayerNorm):
    """`FusedLayerNorm` whose output has the dtype of its parameters, whatever the input's.

    As in Apex, ``elementwise_affine=False`` raises ``RuntimeError``, and unknown keywords are
    ignored.
    """


class MixedFusedRMSNorm(_AlwaysAffine, FusedRMSNorm):
    """`FusedRMSNorm` that always has a weight. See `MixedFusedLayerNorm` for keywords."""


# -- outputs by shape alone ------------------------------------------------------------------------
# Names that Apex's module has beside its custom operators. The operators here, ``apex::row_norm``
# and its backward, have shape functions of their own.

Tensor = torch.Tensor


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
