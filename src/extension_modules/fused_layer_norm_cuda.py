"""``fused_layer_norm_cuda``: layer norm and RMS norm without autograd, on any device.

The name that compiled Apex had at the top level. Arguments are positional only, as there.
Statistics are 1-dimensional, one number for each row: float32, or float64 for a float64 input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex.ops import _rows

__all__ = [
    "backward",
    "backward_affine",
    "forward",
    "forward_affine",
    "forward_affine_mixed_dtypes",
    "rms_backward",
    "rms_backward_affine",
    "rms_forward",
    "rms_forward_affine",
    "rms_forward_affine_mixed_dtypes",
]

Tensor = torch.Tensor
Shape = Sequence[int]


def forward(x: Tensor, normalized_shape: Shape, epsilon: float, /) -> list[Tensor]:
    """Layer norm: ``[y, mean, invvar]``."""
    return _forward(x, normalized_shape, None, None, epsilon)


def forward_affine(
    x: Tensor, normalized_shape: Shape, gamma: Tensor, beta: Tensor, epsilon: float, /
) -> list[Tensor]:
    """Layer norm with weight and bias in the input's dtype: ``[y, mean, invvar]``."""
    _rows.refuse_other_dtype(x, gamma, "forward_affine_mixed_dtypes")
    return _forward(x, normalized_shape, gamma, beta, epsilon)


def forward_affine_mixed_dtypes(
    x: Tensor, normalized_shape: Shape, gamma: Tensor, beta: Tensor, epsilon: float, /
) -> list[Tensor]:
    """Layer norm with weight and bias, whose dtype the output has: ``[y, mean, invvar]``."""
    return _forward(x, normalized_shape, gamma, beta, epsilon)


@torch.no_grad()
def backward(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    epsilon: float,
    memory_efficient: bool,
    /,
) -> Tensor:
    """Gradient of :func:`forward`; with ``memory_efficient`` from the output."""
    gradients = _rows.backward(
        dout, input_or_output, mean, invvar, None, None, normalized_shape, epsilon,
        input_or_output.dtype, True, memory_efficient,
    )  # fmt: skip
    return gradients[0]


@torch.no_grad()
def backward_affine(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    memory_efficient: bool,
    /,
) -> list[Tensor | None]:
    """Gradients of the affine forms: ``[dx, dgamma, dbeta]``.

    ``dx`` has the dtype of ``input_or_output``, with ``memory_efficient`` that of the output.
    """
    gradients = _rows.backward(
        dout, input_or_output, mean, invvar, gamma, beta, normalized_shape, epsilon,
        input_or_output.dtype, True, memory_efficient,
    )  # fmt: skip
    return list(gradients)


def rms_forward(x: Tensor, normalized_shape: Shape, epsilon: float, /) -> list[Tensor]:
    """RMS norm: ``[y, invvar]``."""
    return _forward(x, normalized_shape, None, None, epsilon, centered=False)


def rms_forward_affine(
    x: Tensor, normalized_shape: Shape, gamma: Tensor, epsilon: float, /
) -> list[Tensor]:
    """RMS norm with a weight in the input's dtype: ``[y, invvar]``."""
    _rows.refuse_other_dtype(x, gamma, "rms_forward_affine_mixed_dtypes")
    return _forward(x, normalized_shape, gamma, None, epsilon, centered=False)


def rms_forward_affine_mixed_dtypes(
    x: Tensor, normalized_shape: Shape, gamma: Tensor, epsilon: float, /
) -> list[Tensor]:
    """RMS norm with a weight, whose dtype the output has: ``[y, invvar]``."""
    return _forward(x, normalized_shape, gamma, None, epsilon, centered=False)


@torch.no_grad()
def rms_backward(
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    epsilon: float,
    memory_efficient: bool,
    /,
) -> Tensor:
    """Gradient of :func:`rms_forward`; with ``memory_efficient`` from the output."""
    gradients = _rows.backward(
        dout, input_or_output, None, invvar, None, None, normalized_shape, epsilon,
        input_or_output.dtype, False, memory_efficient,
    )  # fmt: skip
    return gradients[0]


@torch.no_grad()
def rms_backward_affine(
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    gamma: Tensor,
    epsilon: float,
    memory_efficient: bool,
    /,
) -> list[Tensor | None]:
    """Gradients of the affine forms: ``[dx, dgamma]``; ``dx`` as in :func:`backward_affine`."""
    gradients = _rows.backward(
        dout, input_or_output, None, invvar, gamma, None, normalized_shape, epsilon,
        input_or_output.dtype, False, memory_efficient,
    )  # fmt: skip
    return list(gradients[:2])


@torch.no_grad()
def _forward(
    x: Tensor,
    shape: Shape,
    gamma: Tensor | None,
    beta: Tensor | None,
    epsilon: float,
    *,
    centered: bool = True,
) -> list[Tensor]:
    _rows.check("fused_layer_norm_cuda", x, gamma, beta, shape)
    dtype = x.dtype if gamma is None else gamma.dtype
    y, mean, invvar = _rows.forward(x, gamma, beta, shape, epsilon, dtype, centered)
    return [y, invvar] if mean is None else [y, mean, invvar]
