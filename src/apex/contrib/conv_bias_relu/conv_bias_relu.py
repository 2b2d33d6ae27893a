"""Convolutions with bias and ReLU, composed of PyTorch's functions, for a compiler to fuse.

``x`` is ``(N, C, H, W)`` in any memory format and floating dtype, ``weight`` ``(K, C, h, w)``;
``bias`` and ``scale`` have K elements. ``padding`` and ``stride`` are one number each. Under
autocast the convolution is cast like any other.
"""

import torch
import torch.nn.functional as F

from apex.ops._check import ArgumentError

Tensor = torch.Tensor


def ConvBias(x: Tensor, weight: Tensor, bias: Tensor, padding: int, stride: int) -> Tensor:
    """``conv2d(x, weight) + bias``."""
    return F.conv2d(x, weight, _channels("bias", bias, weight).flatten(), stride, padding)


def ConvBiasReLU(x: Tensor, weight: Tensor, bias: Tensor, padding: int, stride: int) -> Tensor:
    """``relu(conv2d(x, weight) + bias)``."""
    return ConvBias(x, weight, bias, padding, stride).relu()


def ConvBiasMaskReLU(
    x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, padding: int, stride: int
) -> Tensor:
    """``relu((conv2d(x, weight) + bias) * mask)``; the mask has no gradient."""
    return (ConvBias(x, weight, bias, padding, stride) * mask.detach()).relu()


def ConvFrozenScaleBiasReLU(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, padding: int, stride: int
) -> Tensor:
    """``relu(conv2d(x, weight) * scale + bias)``; scale and bias have no gradients."""
    y = F.conv2d(x, weight, None, stride, padding)
    scale, bias = (_channels(n, v, weight).detach() for n, v in (("scale", scale), ("bias", bias)))
    return (y * scale.to(y.dtype) + bias.to(y.dtype)).relu()


def _channels(name: str, values: Tensor, weight: Tensor) -> Tensor:
    if values.numel() != len(weight):
        raise ArgumentError(
            f"{name} has shape {list(values.shape)} and weight {list(weight.shape)}. Pass "
            f"{len(weight)} numbers."
        )
    return values.view(1, -1, 1, 1)
