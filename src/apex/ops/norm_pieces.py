"""Layer and RMS norm by PyTorch functions, a block of rows at a time, with a backward of their own.

They serve calls with ``memory_efficient``, whose backward starts from the output; and on a CPU what
is at least 1.25 times as fast as PyTorch's differentiable functions, because a block stays in the
cache; docs/norms-and-losses.md has the numbers.

    xhat = (x - mean) * rstd, or (y - bias) / weight from the output
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),   g = dy * weight;  RMS norm has no mean(g)
    dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from apex.ops._dtypes import NARROW, Optional, wide

BLOCK = 2**16  # elements of a block for each thread: float32 copies stay in the cache
# Elements from which on the call is faster than PyTorch's functions on a CPU: an autograd.Function
# costs some 30 us more, forward and backward.
LEAST = 2**16

_BACKWARD = torch.ops.aten.native_layer_norm_backward
_INPUT_ALONE = [True, False, False]


def pays(x: torch.Tensor, *rest: object) -> bool:
    """Whether this is faster than RMS norm composed of PyTorch's functions."""
    return x.numel() >= LEAST


def pays_in_16_bits(x: torch.Tensor, *rest: object) -> bool:
    """Whether this is faster than layer norm by PyTorch's function in float32."""
    return x.dtype in NARROW and x.numel() >= LEAST


def allocate_rms_norm(
    x: torch.Tensor, weight: Optional, shape: Sequence[int], eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y`` and ``rstd``, uninitialized; one number a row, float32, or float64 for float64."""
    n_rows = math.prod(x.shape[: x.dim() - len(shape)])
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(n_rows, dtype=wide(x))


def allocate_layer_norm(
    x: torch.Tensor, weight: Optional, bias: Optional, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``y``, ``mean`` and ``rstd``, uninitialized."""
    y, rstd = allocate_rms_norm(x, weight, *rest)
    return y, torch.empty_like(rstd), rstd


def _blocks(rows: torch.Tensor) -> Iterator[slice]:
    n_rows, n_cols = rows.shape
    step = max(1, BLOCK * torch.get_num_threads() // n_cols) if rows.is_cpu else n_rows
    for start in range(0, n_rows, step):
        yield slice(start, start + step)


def layer_norm(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Sequence[int],
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``y``, ``mean`` and ``rstd``."""
    to = wide(x)
    if not x.is_cpu or dtype != x.dtype:  # on a CPU PyTorch's kernel widens by itself
        x = x.to(to)
    if weight is None:
        weight = x.new_ones(tuple(shape), dtype=to)  # statistics have its dtype
    bias = torch.zeros_like(weight) if bias is None else bias
    y, mean, rstd = torch.native_layer_norm(x, shape, weight.to(to), bias.to(to), eps)
    return y.to(dtype), mean.view(-1), rstd.view(-1)


def rms_norm(
    x: torch.Tensor, weight: Optional, shape: Sequence[int], eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y`` and ``rstd``."""
    (y, rstd), to = allocate_rms_norm(x, weight, shape, eps, dtype), wide(x)
    rows, out = x.view(len(rstd), -1), y.view(len(rstd), -1)
    gain = None if weight is None else weight.to(to).view(-1)
    for block in _blocks(rows):
        z = rows[block].to(to)
        r = z.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        rstd[block] = r[:, 0]
        if gain is None:
            torch.mul(z, r, out=out[block])
        else:
            torch.mul(z * r, gain, out=out[block])
    return y, rstd


def backward(
    dy: torch.Tensor,
    needs: Sequence[bool],
    *,
    centered: bool,
    rstd: torch.Tensor,
    weight: Optional,
    shape: Sequence[int],
    eps: float,
    bias: Optional = None,
    x: Optional = None,
    mean: Optional = None,
    y: Optional = None,
    x_dtype: torch.dtype | None = None,
    **_: Any,
) -> list[Optional]:
    """Gradients of x, weight and bias, from ``x`` or from the output ``y``."""
    saved = y if x is None else x
    assert saved is not None
    to, n_rows, n_cols = wide(saved, weight), len(rstd), math.prod(shape)
    gain, shift = _row(weight, to), _row(bias, to)
    parameters = [weight, bias]
    wanted = [needs[0], *(p is not None and any(needs[1:]) for p in parameters)]
    dx = torch.empty(dy.shape, dtype=x_dtype or saved.dtype, device=dy.device)
    rows, slopes, out = (t.view(n_rows, n_cols) for t in (saved, dy, dx))
    sums = []
    for block in _blocks(rows):
        d, v, r = slopes[block].to(to), rows[block].to(to), rstd[block, None].to(to)
        if mean is not None:
            found = _BACKWARD(d, v, [n_cols], mean[block, None].to(to), r, gain, gain, wanted)
        else:  # of normalized rows, by PyTorch's layer norm with mean 0 and deviation 1
            xhat = v * r if y is None else _normalized(v, gain, shift, eps)
            products = (d * xhat).sum(0) if wanted[1] else None
            found = [None, products, d.sum(0) if wanted[2] else None]
            if needs[0]:
                zero, one = torch.zeros_like(r), torch.ones_like(r)
                found[0] = _BACKWARD(d, xhat, [n_cols], zero, one, gain, gain, _INPUT_ALONE)[0]
                if not centered:  # RMS norm has no mean(g)
                    total = d.sum(-1, keepdim=True) if gain is None else torch.mv(d, gain)[:, None]
                    found[0].add_(total, alpha=1 / n_cols)
                found[0].mul_(r)
        if needs[0]:
            out[block] = found[0]
        sums.append(found[1:])
    gradients: list[Optional] = [dx]
    for parameter, parts in zip(parameters, zip(*sums, strict=True), strict=True):
        if parameter is None or not any(needs[1:]):
            gradients.append(None)
        else:
            gradients.append(torch.stack(parts).sum(0).view(shape).to(parameter.dtype))
    return gradients[: len(needs)]


def _row(parameter: Optional, dtype: torch.dtype) -> Optional:
    return None if parameter is None else parameter.view(-1).to(dtype)


def _normalized(y: torch.Tensor, weight: Optional, bias: Optional, eps: float) -> torch.Tensor:
    """The normalized rows that an output was made of.

    A weight smaller than eps counts as eps, with its sign.
    """
    if bias is not None:
        y = y - bias
    if weight is None:
        return y
    least = torch.where(weight < 0, -eps, eps).to(weight.dtype)
    return y / torch.where(weight.abs() < eps, least, weight)
