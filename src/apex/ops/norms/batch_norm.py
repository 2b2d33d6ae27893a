"""Parts of a batch norm over several processes: what one process computes, without autograd.

A batch norm in training mode is :func:`moments` of each process, :func:`merge` of all of them and
:func:`normalize`; its backward is :func:`gradient_sums`, added up over the processes, and
:func:`input_gradient`. The communication is in
:mod:`apex.parallel.sync_batchnorm`.

Inputs are ``(N, C, *)`` in any memory format, and may be empty. Statistics and sums have one number
for each channel: float32, or float64 for a float64 input. Results like the input are rounded to its
dtype once. On CUDA these are PyTorch's fused kernels, which ``torch.nn.SyncBatchNorm`` calls too;
elsewhere the same formulas in PyTorch's functions.
"""

from __future__ import annotations

import torch

from apex.ops._dtypes import Optional, to_dtype, wide

Tensor = torch.Tensor

_TINY = torch.finfo(torch.float32).tiny  # nothing beside a variance, and rsqrt stays finite


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel; both are 0 if ``x`` is empty."""
    if x.numel() == 0:
        zeros = x.new_zeros(2, x.shape[1], dtype=wide(x))
        return zeros[0], zeros[1]
    if x.is_cuda:
        mean, rstd = torch.batch_norm_stats(_dense(x), _TINY)
        return mean, rstd.reciprocal().square()
    variance, mean = torch.var_mean(x.to(wide(x)), _all_but_channels(x), correction=0)
    return mean, variance


def merge(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of elements of all processes together.

    Args:
        means: ``(processes, C)``.
        variances: ``(processes, C)``, biased.
        counts: ``(processes, 1)``: elements of a channel, 0 for a process without any; of the dtype
            of the means.

    Returns:
        Two of shape ``(C,)`` and one of shape ``(1,)``.
    """
    total = counts.sum(0)
    share = counts / total.clamp(min=1)
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean).square())).sum(0), total


def normalize(x: Tensor, mean: Tensor, rstd: Tensor, weight: Optional, bias: Optional) -> Tensor:
    """``(x - mean) * rstd * weight + bias``, with ``rstd = 1 / sqrt(variance + eps)``."""
    if x.numel() == 0:
        return torch.empty_like(x)
    if x.is_cuda:
        return torch.batch_norm_elemt(_dense(x), weight, bias, mean, rstd, 0.0)  # 0.0: not read
    y = (x - _column(mean, x)) * _column(_scale(rstd, weight), x)
    return (y if bias is None else y + _column(bias, x)).to(x.dtype)


def gradient_sums(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of ``dy`` and of ``dy * (x - mean)`` over all elements of a channel.

    The gradient of the bias is the first, that of the weight ``rstd`` times the second.
    """
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if x.is_cuda:
        dy, x = _dense(dy), _dense(x)
        return torch.batch_norm_backward_reduce(dy, x, mean, rstd, None, True, False, False)[:2]
    dy, dims = dy.to(mean.dtype), _all_but_channels(x)
    return dy.sum(dims), (dy * (x - _column(mean, x))).sum(dims)


def input_gradient(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Optional,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    """Gradient of ``x``, from the sums over all processes.

    ``weight * rstd * (dy - sum_dy / n - (x - mean) * rstd**2 * sum_dy_xmu / n)``, ``n`` the sum of
    ``counts``, which has any shape.
    """
    if x.numel() == 0:
        return torch.empty_like(x)
    if x.is_cuda:
        weight, counts = to_dtype(weight, mean.dtype), counts.to(torch.int32).view(-1)
        sums = (sum_dy, sum_dy_xmu, counts)
        return torch.batch_norm_backward_elemt(_dense(dy), _dense(x), mean, rstd, weight, *sums)
    total = counts.sum()
    slope = _column(rstd.square() * sum_dy_xmu / total, x)
    dx = dy - _column(sum_dy / total, x) - (x - _column(mean, x)) * slope
    return (dx * _column(_scale(rstd, weight), x)).to(x.dtype)


def _scale(rstd: Tensor, weight: Optional) -> Tensor:
    return rstd if weight is None else rstd * weight


def _column(values: Tensor, x: Tensor) -> Tensor:
    """One number for each channel, shaped so that it meets its channel in ``x``."""
    return values.view(-1, *[1] * (x.dim() - 2))


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _dense(x: Tensor) -> Tensor:
    """As the fused kernels take it: contiguous, or with its channels last."""
    formats = (torch.channels_last, torch.channels_last_3d)
    return x if any(x.is_contiguous(memory_format=f) for f in formats) else x.contiguous()
