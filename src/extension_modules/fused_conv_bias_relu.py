"""``fused_conv_bias_relu``: convolutions with bias and ReLU, without autograd.

A module of compiled Apex. Arguments are positional only: tensors, padding, stride.
"""

from typing import Any

import torch

from apex.contrib.conv_bias_relu import conv_bias_relu as functions

__all__ = [
    "backward",
    "backward_cscale_cbias_relu",
    "backward_no_relu",
    "forward",
    "forward_cscale_cbias_relu",
    "forward_mask",
    "forward_no_relu",
]

Tensors = list[Any]


@torch.no_grad()
def forward(tensors: Tensors, padding: int, stride: int, /) -> Tensors:
    """``[x, weight, bias]``: :func:`~apex.contrib.conv_bias_relu.ConvBiasReLU`."""
    return [functions.ConvBiasReLU(*[*tensors, padding, stride])]


@torch.no_grad()
def forward_no_relu(tensors: Tensors, padding: int, stride: int, /) -> Tensors:
    """``[x, weight, bias]``: :func:`~apex.contrib.conv_bias_relu.ConvBias`."""
    return [functions.ConvBias(*[*tensors, padding, stride])]


@torch.no_grad()
def forward_mask(tensors: Tensors, padding: int, stride: int, /) -> Tensors:
    """``[x, weight, bias, mask]``: :func:`~apex.contrib.conv_bias_relu.ConvBiasMaskReLU`."""
    return [functions.ConvBiasMaskReLU(*[*tensors, padding, stride])]


@torch.no_grad()
def forward_cscale_cbias_relu(tensors: Tensors, padding: int, stride: int, /) -> Tensors:
    """``[x, weight, scale, bias]``: ``ConvFrozenScaleBiasReLU``."""
    return [functions.ConvFrozenScaleBiasReLU(*[*tensors, padding, stride])]


@torch.no_grad()
def backward_no_relu(tensors: Tensors, padding: int, stride: int, /) -> Tensors:
    """``[x, weight, grad]``: gradients of x, weight and bias ``(1, K, 1, 1)``."""
    x, weight, dy = tensors
    both = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [True, True, True]
    dx, dw, db = torch.ops.aten.convolution_backward(dy, x, weight, [len(weight)], *both)
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
