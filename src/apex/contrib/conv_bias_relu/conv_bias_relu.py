"""Convolutions with bias and ReLU, composed of PyTorch's functions, for a compiler to fuse."""

import torch
import torch.nn.functional as F

from apex.ops._check import ArgumentError

Tensor = torch.Tensor


def ConvBias(x: Tensor, weight: Tensor, bias: Tensor, padding: int, stride: int) -> Tensor:
    """Compute ``conv2d(x, weight) + bias``."""
    return F.conv2d(x, weight, _channels("bias", bias, weight).flatten(), stride, padding)


def ConvBiasReLU(x: Tensor, weight: Tensor, bias: Tensor, padding: int, stride: int) -> Tensor:
    """Compute ``relu(conv2d(x, weight) + bias)``."""
    return ConvBias(x, weight, bias, padding, stride).relu()


def ConvBiasMaskReLU(
    x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, padding: int, stride: int
) -> Tensor:
    """Compute ``relu((conv2d(x, weight) + bias) * mask)``, without a gradient of the mask."""
    y = ConvBias(x, weight, bias, padding, stride)
    return (y * mask.detach().to(y.dtype)).relu()


def ConvFrozenScaleBiasReLU(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, padding: int, stride: int
) -> Tensor:
    """Compute ``relu(conv2d(x, weight) * scale + bias)``, without gradients of scale and bias."""
    scale, bias = _channels("scale", scale, weight), _channels("bias", bias, weight)
    y = F.conv2d(x, weight, None, stride, padding)
    return (y * scale.detach().to(y.dtype) + bias.detach().to(y.dtype)).relu()


def _channels(name: str, values: Tensor, weight: Tensor) -> Tensor:
    if values.numel() != len(weight):
        shapes = f"{list(values.shape)} and weight {list(weight.shape)}"
        raise ArgumentError(f"{name} has shape {shapes}. Pass {len(weight)} numbers.")
    return values.view(1, -1, 1, 1)
