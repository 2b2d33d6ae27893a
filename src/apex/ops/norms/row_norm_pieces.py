"""Layer and RMS norm by PyTorch functions, a block of rows at a time, with a backward of their own.

They serve calls with ``memory_efficient``, whose backward starts from the output; and on a CPU what
is at least 1.25 times as fast as PyTorch's differentiable functions, because a block stays in the
cache; docs/performance.md has the numbers. The formulas: :mod:`apex.kernels.row_norms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from apex.ops._dtypes import NARROW, Optional, to_dtype, wide

# Elements of a block for each thread. 4096 x 1024, forward without gradients, one thread of an EPYC
# with 1 MiB of L2 and 32 of L3: 2**16 takes 10 ms, 2**18 6, whole rows 7; bfloat16 11, 6.6 and 11.
BLOCK = 2**18
# Elements above which this is faster than PyTorch's functions on a CPU: an autograd.Function and
# what it calls cost 60 us more. RMS norm of 128 x 1024 in bfloat16 takes 0.8 of the definition's
# time forward and backward, of 64 x 1024 as much. The others begin at TIMES as many: layer norm of
# 16 bits casts the input once more (256 x 1024: 0.6 forward, 1.1 both), and of fewer elements RMS
# norm in float32 is what torch's is, whose sum of squares is rounded once less.
above, TIMES = 2**17 - 1, 8
# Elements of a row up to which torch's norm is taken. It keeps one running sum for each vector
# lane: mean squares are 2e-7 off at 2**14 elements, 2e-6 at 200,704, 2e-5 at 2**20; `mean` 6e-8.
LONG = 2**14

_BACKWARD = torch.ops.aten.native_layer_norm_backward
_INPUT_ALONE = [True, False, False]
_ALL = slice(None)


def serves(
    x: torch.Tensor, weight: Optional, bias: Optional, shape: Any, eps: float, centered: bool,
    *_: Any,
) -> bool:  # fmt: skip
    """Whether this is faster: for RMS norm, and for layer norm of 16 bits."""
    narrow = x.dtype in NARROW
    if x.numel() <= TIMES * above:
        return narrow and not centered
    return narrow or not centered


def allocate(
    x: torch.Tensor, weight: Optional, bias: Optional, shape: Sequence[int], eps: float,
    centered: bool, dtype: torch.dtype, *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``y``, ``mean`` (empty for RMS norm) and ``rstd``: float32, or float64 for float64."""
    n_rows = math.prod(x.shape[: x.dim() - len(shape)])
    rstd = x.new_empty(n_rows, dtype=wide(x))
    return x.new_empty(x.shape, dtype=dtype), rstd.new_empty(n_rows if centered else 0), rstd


def _blocks(rows: torch.Tensor) -> list[slice]:
    """Slices of rows; of one block the slice that takes all, which `_part` need not cut."""
    n_rows, n_cols = rows.shape
    step = max(1, BLOCK * torch.get_num_threads() // n_cols) if rows.is_cpu else n_rows
    if step >= n_rows > 0:
        return [_ALL]
    return [slice(start, start + step) for start in range(0, n_rows, step)]


def _part(rows: torch.Tensor, block: slice) -> torch.Tensor:
    return rows if block is _ALL else rows[block]


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
        return y if y.dtype == dtype else y.to(dtype), mean.view(-1), rstd.view(-1)
    row, n_cols = _row(weight, to), math.prod(shape)
    rows = x.view(-1, n_cols)
    blocks = _blocks(rows)
    if blocks[0] is _ALL and len(shape) == 1 and (x.dim() == 2 or not by_row):
        z, r = _rms_rows(x, row, eps, to, by_row)  # `y` is no view: programs write to it
        return z if dtype == to else z.to(dtype), r.new_empty(0), r.view(-1)
    y, mean, rstd = allocate(x, weight, bias, shape, eps, centered, dtype)
    out = y.view(-1, n_cols)
    for block in blocks:
        z, r = _rms_rows(rows[block], row, eps, to, by_row, out[block] if dtype == to else None)
        rstd[block] = r[:, 0]
        # A result in 16 bits by `out=` takes 1.6 times as long as in place and a copy.
        if dtype != to:
            out[block] = z
    return y, mean, rstd


def _rms_rows(
    rows: torch.Tensor, row: Optional, eps: float, to: torch.dtype, by_row: bool,
    out: Optional = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """RMS norm of some rows, wide, and the factor of each."""
    z, n_cols = rows if rows.dtype == to else rows.to(to), rows.shape[-1]
    if n_cols <= LONG:
        r = torch.linalg.vector_norm(z, dim=-1, keepdim=True).square_().div_(n_cols)
    else:
        r = _sums(z.square(), by_row).div_(n_cols)
    r = r.add_(eps).rsqrt_()
    if out is None and z is not rows:
        z.mul_(r)
    else:
        z = torch.mul(z, r, out=out)
    return z if row is None else z.mul_(row), r


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
    to, n_cols = wide(saved, weight), math.prod(shape)
    gain, shift = _row(weight, to), _row(bias, to)
    wanted = [needs[0], *(p is not None and any(needs[1:]) for p in (weight, bias))]
    rows, slopes = saved.view(-1, n_cols), dy.view(-1, n_cols)
    blocks, dtype = _blocks(rows), dtypes.get("x_dtype", saved.dtype)
    dx, sums = None, []
    for block in blocks:
        parts = [_part(t, block) for t in (slopes, rows, rstd.view(-1, 1))]
        d, v, r = (t if t.dtype == to else t.to(to) for t in parts)
        if mean is not None and centered:
            average = _part(mean.view(-1, 1), block).to(to)
            found = [*_BACKWARD(d, v, [n_cols], average, r, gain, gain, wanted)]
        else:
            xhat = v * r if y is None else _normalized(v, gain, shift, eps)
            found = _from_normalized(d, xhat, r, gain, wanted, centered, by_row)
        if needs[0] and block is _ALL:
            dx = found[0].view(dy.shape).to(dtype)
        elif needs[0]:
            dx = torch.empty(dy.shape, dtype=dtype, device=dy.device) if dx is None else dx
            dx.view(-1, n_cols)[block] = found[0]
        sums.append(found[1:])
    gradients: list[Optional] = [dx]
    for p, want, each in zip((weight, bias), wanted[1:], zip(*sums, strict=True), strict=True):
        if want and p is not None:
            total = each[0] if len(each) == 1 else torch.stack(each).sum(0)
            gradients.append(total.view(shape).to(p.dtype))
        else:
            gradients.append(None)
    return gradients


def _from_normalized(
    d: torch.Tensor, xhat: torch.Tensor, r: torch.Tensor, gain: Optional, wanted: Sequence[bool],
    centered: bool, by_row: bool,
) -> list[Any]:  # fmt: skip
    """Gradients of normalized rows, by PyTorch's layer norm with mean 0 and deviation 1."""
    products = (d * xhat).sum(0) if wanted[1] else None
    found = [None, products, d.sum(0) if wanted[2] else None]
    if not wanted[0]:
        return found
    n_cols, zero, one = d.shape[1], torch.zeros_like(r), torch.ones_like(r)
    dx = _BACKWARD(d, xhat, [n_cols], zero, one, gain, gain, _INPUT_ALONE)[0]
    if not centered:  # RMS norm has no mean of dy * weight
        if gain is None or by_row:
            total = _sums(d if gain is None else d * gain, by_row)
        else:  # 22 us for a block of 1,024 columns where that takes 60
            total = torch.mv(d, gain)[:, None]
        dx.add_(total.div_(n_cols))  # `alpha` is fused in a vector, not at its end
    return [dx.mul_(r), *found[1:]]


def _sums(rows: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Of each row; ``by_row``: of one as of each of two, which torch gives a thread each."""
    if by_row and len(rows) == 1:
        return rows.expand(2, -1).sum(-1, keepdim=True)[:1]
    return rows.sum(-1, keepdim=True)


def _row(parameter: Optional, dtype: torch.dtype) -> Optional:
    return None if parameter is None else to_dtype(parameter.view(-1), dtype)


def _normalized(y: torch.Tensor, weight: Optional, bias: Optional, eps: float) -> torch.Tensor:
    """The normalized rows that an output was made of; see `kernels.row_norms._away_from_zero`."""
    y = y if bias is None else y - bias
    if weight is None:
        return y
    least = torch.where(weight < 0, weight.clamp(max=-eps), weight.clamp(min=eps))
    return y / least
