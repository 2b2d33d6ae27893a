"""Layer and RMS norm of rows by torch's functions, in pieces that stay in the cache on a CPU.

On a CPU torch's own backward is not used as it stands: it adds up weight gradients one row after
the other, in 16 bits where the input is (2000 rows of bfloat16: 28 times the error of rounding).
Its kernel is called in float32, and for some rows at a time.
"""

from __future__ import annotations

import itertools

import torch

from apex.ops import _memory
from apex.ops._dtypes import NARROW, Optional, to_dtype, wide

# Rows of which torch's kernel may add up float32 weight gradients one after the other, for each
# thread. Errors of sums over 2,000 and 16,000 rows of 512 normal numbers, partial sums added in
# float64, in units of rounding: 5.3 for 48 rows at a time, 6.1 for 64, 7.3 for 96, 32 for 2,000;
# products in blocks, which torch.sum adds in a tree: 5.5. 8 are allowed.
ROWS_ADDED = 64
# Columns from which on that is faster than the tree, in two thirds of its time; fewer make it miss
# 8 now and then.
LEAST_COLUMNS = 512
BLOCK = 2**16  # elements of a block of rows for each thread on a CPU: stays in the cache
# What is copied to its place while it is in the cache, for each thread: so many elements, but not
# fewer rows. Forward 2**17 to 2**19 take the same time; backward leaves sums of each piece behind.
PIECE, PIECE_BACK = (2**18, 8), (2**17, 32)
PARTS = 100  # such sums that are kept before they are added up


def forward(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
) -> tuple[torch.Tensor, Optional, torch.Tensor]:
    """Normalize the rows of a matrix; see :func:`apex.ops._rows.forward`."""
    to = wide(x)
    weight, bias = to_dtype(weight, to), to_dtype(bias, to)
    if not centered:
        return _rms_forward(x, weight, eps, dtype, to)
    if dtype != x.dtype or x.device.type != "cpu":
        x = x.to(to)  # on a CPU torch's kernel widens by itself where the weight is float32
    if weight is None and x.dtype != to:
        weight = x.new_ones(x.shape[-1], dtype=to)  # its statistics are float32 if this is
        bias = torch.zeros_like(weight)
    elif weight is not None and bias is None:
        bias = torch.zeros_like(weight)
    y, mean, rstd = _native_forward(x, weight, bias, eps)
    return y.to(dtype), mean.view(-1), rstd.view(-1)


def _rows_of(piece: tuple[int, int], n_cols: int) -> int:
    elements, rows = piece
    return max(rows, elements // max(n_cols, 1)) * torch.get_num_threads()


def _split(step: int, *tensors: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], ...]:
    return tuple(torch.split(tensor, step) for tensor in tensors)


def _rms_forward(
    x: torch.Tensor, weight: Optional, eps: float, dtype: torch.dtype, to: torch.dtype
) -> tuple[torch.Tensor, None, torch.Tensor]:
    n_rows, n_cols = x.shape
    step = _rows_of(PIECE, n_cols) if x.is_cpu else max(n_rows, 1)
    y = _memory.empty(x.shape, dtype, x.device)
    rstd = torch.empty(n_rows, 1, dtype=to, device=x.device)
    for piece, r, out in zip(*_split(step, x, rstd, y), strict=True):
        rows = piece.to(to)
        torch.rsqrt(rows.square().mean(-1, keepdim=True).add_(eps), out=r)
        z = torch.mul(rows, r, out=out) if dtype == to else rows * r
        if weight is not None:
            z.mul_(weight)
        if z is not out:
            out.copy_(z)
    return y, None, rstd.view(-1)


def _native_forward(
    x: torch.Tensor, weight: Optional, bias: Optional, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer norm by torch's kernel; a large result piece by piece into memory of ours."""
    shape = x.shape[-1:]
    if not _memory.pays(x.numel(), x.dtype, x.device):
        return torch.native_layer_norm(x, shape, weight, bias, eps)
    y, stats = _memory.empty(x.shape, x.dtype, x.device), []
    step = _rows_of(PIECE, shape[0])
    for rows, out in zip(*_split(step, x, y), strict=True):
        piece, *found = torch.native_layer_norm(rows, shape, weight, bias, eps)
        out.copy_(piece)
        stats.append(found)
    mean, rstd = (torch.cat(parts) for parts in zip(*stats, strict=True))
    return y, mean, rstd


def backward(
    dy: torch.Tensor,
    saved: torch.Tensor,
    mean: Optional,
    rstd: torch.Tensor,
    weight: Optional,
    bias: Optional,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
    memory_efficient: bool,
    weight_gradients: bool,
) -> tuple[torch.Tensor, Optional, Optional]:
    """Sums over rows in a tree, unless those of torch's kernel are exact enough."""
    to = wide(saved, weight)
    gain, rstd = to_dtype(weight, to), rstd.to(to).view(-1, 1)
    mean = torch.zeros_like(rstd) if mean is None else mean.to(to).view(-1, 1)
    n_rows, n_cols = dy.shape
    wanted = weight is not None and weight_gradients
    few = n_rows  # where 16-bit weights are, errors of float32 sums vanish in the rounding
    if wanted and weight is not None and weight.dtype not in NARROW:
        few = ROWS_ADDED * torch.get_num_threads()
    if (
        centered
        and not memory_efficient
        and dy.is_cpu
        and (n_rows <= few or n_cols >= LEAST_COLUMNS)
    ):
        sums = (wanted, wanted and bias is not None)
        dx, dweight, dbias = _native_backward(dy, saved, mean, rstd, gain, sums, few, dtype)
        return dx, _like(dweight, weight), _like(dbias, bias)
    dx, dweight, dbias = _memory.empty(dy.shape, dtype, dy.device), None, None
    if wanted and bias is not None:
        dbias = dy.sum(0, dtype=to)
    step = max(1, BLOCK * torch.get_num_threads() // max(n_cols, 1))
    sums_of = torch.zeros(max(1, -(-n_rows // step)), n_cols, dtype=to, device=dy.device)
    for number, start in enumerate(range(0, n_rows, step)):  # blocks of rows stay in the cache
        block = slice(start, start + step) if n_rows > step else slice(None)
        d, x, r, m = dy[block].to(to), saved[block].to(to), rstd[block], mean[block]
        if memory_efficient:
            x = _normalized_again(x, gain, to_dtype(bias, to), eps)
        dx[block] = _dx(d, x, r, m, gain, centered, memory_efficient)
        if wanted:
            xhat = x if memory_efficient else (x - m if centered else x) * r
            torch.sum(xhat * d, 0, out=sums_of[number])
    if wanted:
        dweight = sums_of.sum(0)
    return dx, _like(dweight, weight), _like(dbias, bias)


def _like(found: Optional, parameter: Optional) -> Optional:
    return found if found is None or parameter is None else found.to(parameter.dtype)


def _native_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    gain: Optional,
    sums: tuple[bool, bool],
    few: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, Optional, Optional]:
    """Gradients by torch's kernel of layer norm, which adds up at most ``few`` rows at a time.

    It does so in float32: called with 16 bits it would add up in 16. The gradient of the input is
    made by one call, unless it is put into memory of ours or is of another dtype.
    """
    kernel, shape, to = torch.ops.aten.native_layer_norm_backward, x.shape[-1:], rstd.dtype
    pays = _memory.pays(x.numel(), dtype, x.device)
    one_call = dy.dtype == x.dtype == dtype and not pays
    if one_call:
        full = dtype == to and len(x) <= few
        if gain is None and dtype != to:
            gain = torch.ones(shape, dtype=to)  # else it wants 16-bit statistics
        mask = (True, *sums) if full else (True, False, False)
        dx, dweight, dbias = kernel(dy, x, shape, mean, rstd, gain, gain, mask)
        if full or not any(sums):
            return dx, dweight, dbias
    else:
        dx = _memory.empty(x.shape, dtype, x.device)
    if dtype != to or pays:
        few = min(few, _rows_of(PIECE_BACK, shape[0]))
    parts: tuple[list[torch.Tensor], ...] = tuple([] for needed in sums if needed)
    few, mask = max(few, 1), (not one_call, *sums)
    outs = itertools.repeat(dx) if one_call else torch.split(dx, few)
    for d, rows, m, r, out in zip(*_split(few, dy, x, mean, rstd), outs, strict=False):
        piece, *found = kernel(d.to(to), rows.to(to), shape, m, r, gain, gain, mask)
        if not one_call:
            out.copy_(piece)
        for part, new in zip(parts, found, strict=False):
            part.append(new)
            if len(part) == PARTS:
                part[:] = [_added(part)]
    dweight, dbias = (*map(_added, parts), None, None)[:2]
    return dx, dweight, dbias


def _added(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0, dtype=torch.float64)


def _dx(
    d: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor,
    gain: Optional,
    centered: bool,
    normalized: bool,
) -> torch.Tensor:
    """Gradient of a block of rows; ``normalized`` says that ``x`` is."""
    if normalized:
        mean, one = torch.zeros_like(rstd), torch.ones_like(rstd)
    else:
        one = rstd
    dx: torch.Tensor = torch.ops.aten.native_layer_norm_backward(
        d, x, [x.shape[-1]], mean, one, gain, None, [True, False, False]
    )[0]
    if not centered:  # torch's layer norm with a mean of 0 is RMS norm but for this term
        total = d.sum(-1, keepdim=True) if gain is None else torch.mv(d, gain).view(-1, 1)
        dx.add_(total.mul_(one).div_(x.shape[-1]))
    return dx.mul_(rstd) if normalized else dx


def _normalized_again(
    y: torch.Tensor, weight: Optional, bias: Optional, eps: float
) -> torch.Tensor:
    if bias is not None:
        y = y - bias
    if weight is None:
        return y
    least = torch.where(weight < 0, -eps, eps).to(weight.dtype)
    return y / torch.where(weight.abs() < eps, least, weight)
