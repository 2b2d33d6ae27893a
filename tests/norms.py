"""Layer norm and RMS norm by their formulas: in float64, what tests compare with."""

import torch


def layer_norm_reference(x, weight, bias, shape, eps):
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last dimensions ``shape``."""
    dims = tuple(range(-len(shape), 0))
    centered = x - x.mean(dims, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm_reference(x, weight, shape, eps):
    """x / sqrt(mean(x ** 2) + eps) * weight, over the last dimensions ``shape``."""
    dims = tuple(range(-len(shape), 0))
    y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return y if weight is None else y * weight


def group_norm_reference(x, weight, bias, groups, eps, silu):
    grouped = x.reshape(x.shape[0], groups, -1)
    centered = grouped - grouped.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    y, shape = y.reshape(x.shape), (-1, *[1] * (x.dim() - 2))
    y = y if weight is None else y * weight.view(shape)
    y = y if bias is None else y + bias.view(shape)
    return torch.nn.functional.silu(y) if silu else y
