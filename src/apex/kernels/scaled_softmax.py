"""Softmax of scaled and masked rows; see :mod:`apex.ops.layers.scaled_softmax` for the definition.

Two walks over the blocks of a row. The first finds the largest logit and the sum of exponentials,
rescaled when a larger logit comes (Milakov and Gimelshein, arXiv:1805.02867); backward the sum of
dy * y. The second computes. A row of one block stays in registers, that is, the compiler reads it
once (`./dev kernels` shows the bytes); the second walk over a longer one finds much in the cache.

A causal row is read up to the end of the 16 columns in which its diagonal lies: so every access is
whole, 128 bits wide. A mask is read through its strides, 0 where heads or batches share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._launching import half, power_of_2
from apex.kernels._plans import Family
from apex.kernels._settings import kept, setting

# The longest rows of one block: 32 elements a thread forward, in 102 registers at most; backward 16
# of each of two tensors. Longer rows: two 128-bit reads of 16-bit numbers a thread. Derived from
# the compiled code (`./dev kernels`), not tuned on a GPU.
WIDEST_FORWARD, WIDEST_BACKWARD, WARPS = 16384, 8192, 16
BLOCK, BLOCK_WARPS = 4096, 8
SMALLEST_TILE = 2048  # elements: short rows share a program


@triton.jit
def _columns(start, query, n_cols, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of a block, which of them are read, and which count."""
    cols = start + tl.arange(0, BLOCK)[None, :]
    read = cols < n_cols
    counts = read
    if CAUSAL:
        counts = read & (cols <= query)
        read &= cols < query // 16 * 16 + 16
    return cols, read, counts


@triton.jit
def _logits(x_ptr, mask_ptr, cols, read, counts, scale):
    z = tl.load(x_ptr + cols, mask=read, other=0.0).to(tl.float32) * scale
    if mask_ptr is not None:
        z = tl.where(tl.load(mask_ptr + cols, mask=read, other=0) == 1, -10000.0, z)
    return tl.where(counts, z, -float("inf"))


@triton.jit
def _exp(z, largest):
    """``exp(z - largest)``, which is 0 and not nan where all are -inf; below 2**-126 it is 0.

    2 instructions behind the difference on sm_90; `tl.exp` has 5.
    """
    return tl.exp2((z - tl.where(largest == -float("inf"), 0.0, largest)) * 1.4426950408889634)


@triton.jit
def scaled_softmax_forward(
    x_ptr, mask_ptr, y_ptr,
    n_rows, twice_cols, queries, heads, twice_batch, twice_head, twice_query, scale,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows, in blocks. ``WHOLE``: of one block, which the compiler keeps in registers."""
    n_cols = half(twice_cols)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = rows < n_rows
    query = rows % queries
    x_ptr += rows.to(tl.int64) * n_cols
    y_ptr += rows.to(tl.int64) * n_cols
    if mask_ptr is not None:
        matrix = rows // queries
        mask_ptr += (matrix // heads).to(tl.int64) * half(twice_batch)
        mask_ptr += (matrix % heads).to(tl.int64) * half(twice_head)
        mask_ptr += query.to(tl.int64) * half(twice_query)
    largest = tl.full((ROWS, 1), -float("inf"), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    for start in range(0, BLOCK if WHOLE else tl.max(query) + 1 if CAUSAL else n_cols, BLOCK):
        cols, read, counts = _columns(start, query, n_cols, CAUSAL, BLOCK)
        z = _logits(x_ptr, mask_ptr, cols, read & inside, counts, scale)
        grown = tl.maximum(largest, tl.max(z, axis=1, keep_dims=True))
        total = total * _exp(largest, grown) + tl.sum(_exp(z, grown), axis=1, keep_dims=True)
        largest = grown
    inverse = tl.div_rn(1.0, total)
    if mask_ptr is not None:
        inverse = tl.where((largest <= -10000.0) & (total == total), 0.0, inverse)
    for start in range(0, BLOCK if WHOLE else n_cols, BLOCK):
        cols, read, counts = _columns(start, query, n_cols, CAUSAL, BLOCK)
        z = _logits(x_ptr, mask_ptr, cols, read & inside, counts, scale)
        y = tl.where(counts, _exp(z, largest) * inverse, 0.0)  # 0 in a row of nan, too
        tl.store(y_ptr + cols, y, mask=inside & (cols < n_cols))


@triton.jit
def scaled_softmax_backward(
    dy_ptr, y_ptr, dx_ptr,
    n_rows, twice_cols, queries, scale,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of some rows, as above."""
    n_cols = half(twice_cols)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = rows < n_rows
    query = rows % queries
    dy_ptr += rows.to(tl.int64) * n_cols
    y_ptr += rows.to(tl.int64) * n_cols
    dx_ptr += rows.to(tl.int64) * n_cols
    dots = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, BLOCK if WHOLE else tl.max(query) + 1 if CAUSAL else n_cols, BLOCK):
        cols, read, counts = _columns(start, query, n_cols, CAUSAL, BLOCK)
        dy = tl.load(dy_ptr + cols, mask=read & inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=read & inside, other=0.0).to(tl.float32)
        dots += tl.where(counts, dy, 0.0) * y
    dot = tl.sum(dots, axis=1, keep_dims=True)
    for start in range(0, BLOCK if WHOLE else n_cols, BLOCK):
        cols, read, counts = _columns(start, query, n_cols, CAUSAL, BLOCK)
        dy = tl.load(dy_ptr + cols, mask=read & inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=read & inside, other=0.0).to(tl.float32)
        dx = (tl.where(counts, dy, 0.0) - dot) * y * scale
        if CAUSAL:
            dx = tl.where(counts, dx, 0.0)  # in a row of nan, too
        tl.store(dx_ptr + cols, dx, mask=inside & (cols < n_cols))


# -- launching -----------------------------------------------------------------------------------


# Launches without fusion: every product is rounded, as in PyTorch's functions.
@kept
def _of_forward(
    n_cols: int, dtype: torch.dtype, unmasked: bool, causal: bool
) -> tuple[int, Family]:
    whole, rows, block, warps = _tile("softmax_forward", n_cols, dtype, WIDEST_FORWARD)
    constants = (causal, whole, rows, block)
    return rows, Family(scaled_softmax_forward, constants, warps, fuse=False)


@kept
def _of_backward(
    n_cols: int, dtype: torch.dtype, dy_dtype: torch.dtype, causal: bool
) -> tuple[int, Family]:
    whole, rows, block, warps = _tile("softmax_backward", n_cols, dtype, WIDEST_BACKWARD)
    constants = (causal, whole, rows, block)
    return rows, Family(scaled_softmax_backward, constants, warps, fuse=False)


def _tile(op: str, n_cols: int, dtype: torch.dtype, widest: int) -> tuple[bool, int, int, int]:
    """Whether a row is one block; rows and columns of a tile, and warps."""
    block, whole = power_of_2(n_cols), int(n_cols <= widest)
    elements = max(SMALLEST_TILE, block)
    # as many elements a thread as in the widest
    warps = min(WARPS, elements * WARPS // widest)
    if not whole:
        elements, warps = BLOCK, BLOCK_WARPS
    whole, elements, warps = setting(
        op, dtype, (n_cols,), whole=whole, elements=elements, warps=warps
    )
    if not whole:
        return False, 1, elements, warps
    return True, elements // block, block, warps


def _readable(
    mask: torch.Tensor, n_cols: int, padded: bool = False
) -> tuple[torch.Tensor, list[int]]:
    """A mask as bytes, the columns of a row side by side, and twice its other three strides.

    ``padded``: multiples of 16, like the 0 of dimensions that are shared, so that the kernel that
    Triton makes, and its order of sums, does not depend on which are.
    """
    if mask.shape[-1] != n_cols:
        mask = mask.expand(*mask.shape[:-1], n_cols)
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    if padded and n_cols % 8:
        mask = torch.nn.functional.pad(mask.view(torch.uint8), (0, -n_cols % 8))[..., :n_cols]
    strides = [0, 0, 0]  # in a loop: a comprehension has a frame
    for place, (size, stride) in enumerate(
        zip(mask.shape, mask.stride(), strict=True), -mask.dim()
    ):
        if size != 1 and place < -1:
            strides[place + 1] = 2 * stride
    return mask.view(torch.uint8), strides


def forward(
    x: torch.Tensor, mask: Any, scale: float, causal: bool, *, pad_mask: bool = False
) -> torch.Tensor:
    """Compute the result, contiguous; ``pad_mask``: see `_readable`."""
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    *batch, queries, n_cols = x.shape
    n_rows, heads, strides = x.numel() // n_cols, 1, [0, 0, 0]
    if mask is not None:
        mask, strides = _readable(mask, n_cols, pad_mask)
        heads = batch[-1] if batch else 1
    rows, family = _of_forward(n_cols, x.dtype, mask is None, causal)
    family.launch(
        (-(-n_rows // rows), 1, 1), (x, mask, y),
        (n_rows, 2 * n_cols, queries, heads, *strides, float(scale)),
        n_rows, queries, heads, *strides,
    )  # fmt: skip
    return y


def backward(
    dy: torch.Tensor, needs: Sequence[bool], *, y: torch.Tensor, scale: float, causal: bool,
    out: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Compute the gradient of the input, contiguous.

    ``out``, if given, is written, and may be ``dy``: a program reads each block of its own rows
    before it writes it.
    """
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format) if out is None else out
    dy, y, queries, n_cols = dy.contiguous(), y.contiguous(), y.shape[-2], y.shape[-1]
    n_rows = y.numel() // n_cols
    rows, family = _of_backward(n_cols, y.dtype, dy.dtype, causal)
    family.launch(
        (-(-n_rows // rows), 1, 1), (dy, y, dx), (n_rows, 2 * n_cols, queries, float(scale)),
        n_rows, queries,
    )  # fmt: skip
    return [dx]
