"""Old name of NVIDIA's Apex: layer norm and RMS norm without autograd, on any device.

A module of compiled Apex. Arguments are positional only. Statistics are 1-dimensional, one number
for each row: float32, or float64 for a float64 input.
"""

import math
from collections.abc import Sequence

import torch

from apex.ops._check import ArgumentError
from apex.ops.norms import row_norms
from apex.ops.norms.row_norms import check_norm, refuse_other_dtype

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
    refuse_other_dtype(x, gamma, "forward_affine_mixed_dtypes")
    return _forward(x, normalized_shape, gamma, beta, epsilon)


def forward_affine_mixed_dtypes(
    x: Tensor, normalized_shape: Shape, gamma: Tensor, beta: Tensor, epsilon: float, /
) -> list[Tensor]:
    """Layer norm with weight and bias, whose dtype the output has: ``[y, mean, invvar]``."""
    return _forward(x, normalized_shape, gamma, beta, epsilon)


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
    saved = (mean, invvar, input_or_output)
    return backward_affine(dout, *saved, normalized_shape, None, None, epsilon, memory_efficient)[0]


@torch.no_grad()
def backward_affine(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    gamma: Tensor | None,
    beta: Tensor | None,
    epsilon: float,
    memory_efficient: bool,
    /,
) -> list[Tensor]:
    """Gradients of the affine forms: ``[dx, dgamma, dbeta]``.

    ``dx`` has the dtype of ``input_or_output``, with ``memory_efficient`` that of the output.
    """
    return norm_backward(
        dout, mean, invvar, input_or_output, normalized_shape, gamma, beta, epsilon,
        memory_efficient,
    )  # fmt: skip


def rms_forward(x: Tensor, normalized_shape: Shape, epsilon: float, /) -> list[Tensor]:
    """RMS norm: ``[y, invvar]``."""
    return _forward(x, normalized_shape, None, None, epsilon, centered=False)


def rms_forward_affine(
    x: Tensor, normalized_shape: Shape, gamma: Tensor, epsilon: float, /
) -> list[Tensor]:
    """RMS norm with a weight in the input's dtype: ``[y, invvar]``."""
    refuse_other_dtype(x, gamma, "rms_forward_affine_mixed_dtypes")
    return _forward(x, normalized_shape, gamma, None, epsilon, centered=False)


def rms_forward_affine_mixed_dtypes(
    x: Tensor, normalized_shape: Shape, gamma: Tensor, epsilon: float, /
) -> list[Tensor]:
    """RMS norm with a weight, whose dtype the output has: ``[y, invvar]``."""
    return _forward(x, normalized_shape, gamma, None, epsilon, centered=False)


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
    rest = (normalized_shape, None, epsilon, memory_efficient)
    return rms_backward_affine(dout, invvar, input_or_output, *rest)[0]


@torch.no_grad()
def rms_backward_affine(
    dout: Tensor,
    invvar: Tensor,
    input_or_output: Tensor,
    normalized_shape: Shape,
    gamma: Tensor | None,
    epsilon: float,
    memory_efficient: bool,
    /,
) -> list[Tensor]:
    """Gradients of the affine forms: ``[dx, dgamma]``; ``dx`` as in :func:`backward_affine`."""
    return norm_backward(
        dout, None, invvar, input_or_output, normalized_shape, gamma, None, epsilon,
        memory_efficient, centered=False,
    )[:2]  # fmt: skip


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
    check_norm("fused_layer_norm_cuda", x, gamma, beta, shape)
    dtype = x.dtype if gamma is None else gamma.dtype
    y, mean, invvar = row_norms.OP.operator(x, gamma, beta, shape, epsilon, centered, dtype)
    return [y, mean, invvar] if centered else [y, invvar]


def norm_backward(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    saved: Tensor,
    shape: Shape,
    gamma: Tensor | None,
    beta: Tensor | None,
    epsilon: float,
    memory_efficient: bool,
    *,
    centered: bool = True,
) -> list[Tensor]:
    """``[dx, dgamma, dbeta]``, empty where there is no parameter; for ``fast_layer_norm`` too."""
    check_norm("fused_layer_norm_cuda", saved, gamma, beta, shape)
    if saved.shape != dout.shape:
        raise ArgumentError(
            f"fused_layer_norm_cuda: dout has shape {list(dout.shape)} and input_or_output "
            f"{list(saved.shape)}. Pass two tensors of the same shape."
        )
    rows = math.prod(saved.shape[: saved.dim() - len(shape)])
    statistics = {"invvar": invvar, "mean": mean}
    for name in ("invvar", "mean") if centered and not memory_efficient else ("invvar",):
        tensor = statistics[name]
        found = None if tensor is None else tensor.numel()
        if found != rows:  # kernels would read beyond its end
            raise ArgumentError(
                f"fused_layer_norm_cuda: {name} has {found} elements. Pass one for each of the "
                f"{rows} rows, as the forward returned it."
            )
    needs, rest = [True, True, True], (shape, epsilon, centered, saved.dtype)
    if memory_efficient:
        run = row_norms.MEMORY_EFFICIENT.backward_operator
        return list(run(dout, needs, saved, gamma, beta, invvar, *rest, saved.dtype))
    mean = invvar.new_empty(0) if mean is None else mean
    run = row_norms.OP.backward_operator
    return list(run(dout, needs, saved, gamma, beta, mean, invvar, *rest))
