"""Old name of NVIDIA's Apex: ``apex.contrib.conv_bias_relu`` for lists, without autograd.

A module of compiled Apex. Arguments are positional only: tensors, padding, stride.
"""

from collections.abc import Callable
from typing import Any

import torch

from apex.contrib.conv_bias_relu import conv_bias_relu as of

__all__ = ["backward", "backward_cscale_cbias_relu", "backward_no_relu", "forward",
           "forward_cscale_cbias_relu", "forward_mask", "forward_no_relu"]  # fmt: skip

Tensors = list[torch.Tensor]


def _forward(function: Callable[..., torch.Tensor]) -> Callable[[Tensors, int, int], Tensors]:
    @torch.no_grad()
    def forward(tensors: Tensors, padding: int, stride: int, /) -> Tensors:
        return [function(*tensors, padding, stride)]

    forward.__doc__ = f"``[{function.__name__}(*tensors, padding, stride)]``."
    return forward


forward, forward_no_relu = _forward(of.ConvBiasReLU), _forward(of.ConvBias)
forward_mask = _forward(of.ConvBiasMaskReLU)
forward_cscale_cbias_relu = _forward(of.ConvFrozenScaleBiasReLU)


def backward_no_relu(tensors: Tensors, padding: int, stride: int, /) -> Tensors:
    """``[x, weight, grad]``: gradients of x, weight and bias ``(1, K, 1, 1)``."""
    x, weight, dy = tensors
    rest: Any = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [True] * 3)
    dx, dw, db = torch.ops.aten.convolution_backward(dy, x, weight, [len(weight)], *rest)
    return [dx, dw, db.view(1, -1, 1, 1)]


def backward(tensors: Tensors, padding: int, stride: int, /) -> Tensors:
    """``[x, weight, output, grad]``: gradients of x, weight and bias ``(1, K, 1, 1)``."""
    x, weight, y, dy = tensors
    return backward_no_relu([x, weight, dy.masked_fill(y <= 0, 0.0)], padding, stride)


def backward_cscale_cbias_relu(tensors: Tensors, padding: int, stride: int, /) -> Tensors:
    """``[x, weight, scale, output, grad]``: gradients of x and weight."""
    x, weight, scale, y, dy = tensors
    dy = dy.masked_fill(y <= 0, 0.0) * scale.view(1, -1, 1, 1).to(dy.dtype)
    return backward_no_relu([x, weight, dy], padding, stride)[:2]
