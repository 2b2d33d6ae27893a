"""Layer and RMS norm by PyTorch functions, a block of rows at a time, with a backward of their own.

They serve calls with ``memory_efficient``, whose backward starts from the output; and on a CPU what
is at least 1.25 times as fast as PyTorch's differentiable functions, because a block stays in the
cache; docs/norms-and-losses.md has the numbers. The formulas: :mod:`apex.kernels.row_norms`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from apex.ops._dtypes import NARROW, Optional, wide

# Elements of a block for each thread. 4096 x 1024, forward without gradients, one thread of an EPYC
# with 1 MiB of L2 and 32 of L3: 2**16 takes 10 ms, 2**18 6, whole rows 7; bfloat16 11, 6.6 and 11.
BLOCK = 2**18
# Elements above which this is faster than PyTorch's functions on a CPU: an autograd.Function
# costs some 30 us more, forward and backward, and casts the input once more.
above = 2**20 - 1
# Elements of a row up to which torch's norm is taken. It keeps one running sum for each vector
# lane: mean squares are 2e-7 off at 2**14 elements, 2e-6 at 200,704, 2e-5 at 2**20; `mean` 6e-8.
LONG = 2**14

_BACKWARD = torch.ops.aten.native_layer_norm_backward
_INPUT_ALONE = [True, False, False]


def serves(
    x: torch.Tensor, weight: Optional, bias: Optional, shape: Any, eps: float, centered: bool,
    dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Whether this is faster: for RMS norm, and for layer norm of 16 bits."""
    return not centered or x.dtype in NARROW


def allocate(
    x: torch.Tensor, weight: Optional, bias: Optional, shape: Sequence[int], eps: float,
    centered: bool, dtype: torch.dtype, *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``y``, ``mean`` (empty for RMS norm) and ``rstd``: float32, or float64 for float64."""
    n_rows = math.prod(x.shape[: x.dim() - len(shape)])
    rstd = x.new_empty(n_rows, dtype=wide(x))
    return x.new_empty(x.shape, dtype=dtype), rstd.new_empty(n_rows if centered else 0), rstd


def _blocks(rows: torch.Tensor) -> Iterator[slice]:
    n_rows, n_cols = rows.shape
    step = max(1, BLOCK * torch.get_num_threads() // n_cols) if rows.is_cpu else n_rows
    for start in range(0, n_rows, step):
        yield slice(start, start + step)


def forward(
    x: torch.Tensor, weight: Optional, bias: Optional, shape: Sequence[int], eps: float,
    centered: bool, dtype: torch.dtype, *_: Any, by_row: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As :func:`allocate`, computed; ``by_row``: with the same bits whatever the other rows are."""
    to = wide(x)
    if centered:
        if not x.is_cpu or dtype != x.dtype:  # on a CPU PyTorch's kernel widens by itself
            x = x.to(to)
        # statistics have the weight's dtype
        gain = x.new_ones(tuple(shape), dtype=to) if weight is None else weight.to(to)
        shift = torch.zeros_like(gain) if bias is None else bias.to(to)
        y, mean, rstd = torch.native_layer_norm(x, shape, gain, shift, eps)
        return y.to(dtype), mean.view(-1), rstd.view(-1)
    y, mean, rstd = allocate(x, weight, bias, shape, eps, centered, dtype)
    rows, out, row = x.view(len(rstd), -1), y.view(len(rstd), -1), _row(weight, to)
    for block in _blocks(rows):
        z = rows[block].to(to)
        if rows.shape[1] <= LONG:
            norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
            r = norm.square_().div_(rows.shape[1])
        else:
            r = _sums(z.square(), by_row).div_(rows.shape[1])
        r = r.add_(eps).rsqrt_()
        rstd[block] = r[:, 0]
        # A result in 16 bits by `out=` takes 1.6 times as long as in place and a copy.
        if dtype == to:
            z = torch.mul(z, r, out=out[block])
        else:
            z = z * r if x.dtype == to else z.mul_(r)
        z = z if row is None else z.mul_(row)
        if dtype != to:
            out[block] = z
    return y, mean, rstd


def backward(
    dy: torch.Tensor,
    needs: Sequence[bool],
    *,
    weight: Optional,
    bias: Optional,
    rstd: torch.Tensor,
    shape: Sequence[int],
    eps: float,
    centered: bool,
    x: Optional = None,
    mean: Optional = None,
    y: Optional = None,
    by_row: bool = False,
    **dtypes: torch.dtype,
) -> list[Optional]:
    """Gradients of x, weight and bias, from ``x`` or from the output ``y``."""
    saved = y if x is None else x
    assert saved is not None
    to, n_rows, n_cols = wide(saved, weight), len(rstd), math.prod(shape)
    gain, shift = _row(weight, to), _row(bias, to)
    wanted = [needs[0], *(p is not None and any(needs[1:]) for p in (weight, bias))]
    dx = torch.empty(dy.shape, dtype=dtypes.get("x_dtype", saved.dtype), device=dy.device)
    rows, slopes, out = (t.view(n_rows, n_cols) for t in (saved, dy, dx))
    sums = []
    for block in _blocks(rows):
        d, v, r = slopes[block].to(to), rows[block].to(to), rstd[block, None].to(to)
        if mean is not None and centered:
            found = _BACKWARD(d, v, [n_cols], mean[block, None].to(to), r, gain, gain, wanted)
        else:  # of normalized rows, by PyTorch's layer norm with mean 0 and deviation 1
            xhat = v * r if y is None else _normalized(v, gain, shift, eps)
            products = (d * xhat).sum(0) if wanted[1] else None
            found = [None, products, d.sum(0) if wanted[2] else None]
            if needs[0]:
                zero, one = torch.zeros_like(r), torch.ones_like(r)
                found[0] = _BACKWARD(d, xhat, [n_cols], zero, one, gain, gain, _INPUT_ALONE)[0]
                if not centered:  # RMS norm has no mean of dy * weight
                    if gain is None or by_row:
                        total = _sums(d if gain is None else d * gain, by_row)
                    else:  # 22 us for a block of 1,024 columns where that takes 60
                        total = torch.mv(d, gain)[:, None]
                    found[0].add_(
                        total.div_(n_cols)
                    )  # `alpha` is fused in a vector, not at its end
                found[0].mul_(r)
        if needs[0]:
            out[block] = found[0]
        sums.append(found[1:])
    gradients: list[Optional] = [dx]
    for parameter, want, parts in zip(
        (weight, bias), wanted[1:], zip(*sums, strict=True), strict=True
    ):
        if want and parameter is not None:
            gradients.append(torch.stack(parts).sum(0).view(shape).to(parameter.dtype))
        else:
            gradients.append(None)
    return gradients


def _sums(rows: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Of each row; ``by_row``: of one as of each of two, which torch gives a thread each."""
    if by_row and len(rows) == 1:
        return rows.expand(2, -1).sum(-1, keepdim=True)[:1]
    return rows.sum(-1, keepdim=True)


def _row(parameter: Optional, dtype: torch.dtype) -> Optional:
    return None if parameter is None else parameter.view(-1).to(dtype)


def _normalized(y: torch.Tensor, weight: Optional, bias: Optional, eps: float) -> torch.Tensor:
    """The normalized rows that an output was made of; see `kernels.row_norms._away_from_zero`."""
    y = y if bias is None else y - bias
    if weight is None:
        return y
    least = weight.new_full((), eps)  # torch's default dtype would decide that of two numbers
    least = torch.where(weight < 0, -least, least)
    return y / torch.where(weight.abs() < eps, least, weight)
