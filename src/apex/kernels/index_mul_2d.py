"""Rows of a matrix times rows that an index names; see :mod:`apex.ops.layers.index_mul_2d`.

A program computes a tile of some rows and columns. For the gradient of the matrix that is indexed
it adds up, for one of its rows and a block of columns, all rows with that index, some at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._launching import cdiv, half, power_of_2
from apex.kernels._plans import Family

TILE = 1024  # 4 warps of 32 lanes, 128 bits of a 16-bit tensor each
COLUMNS = 128  # of a tile, at most
WARPS = 4


@triton.jit
def _products(
    x_ptr, in1_ptr, index_ptr, y_ptr, size, in1_rows, twice_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = half(twice_columns)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < size)[:, None] & (column < columns)[None, :]
    index = tl.load(index_ptr + row, mask=row < size, other=-1).to(tl.int64)
    inside = (index >= 0) & (index < in1_rows)  # others are no addresses; they give nan
    at = row[:, None] * columns + column[None, :]
    source = index[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    chosen = tl.load(in1_ptr + source, mask=mask & inside[:, None], other=float("nan"))
    y = x * chosen.to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sums(
    dy_ptr, in2_ptr, order_ptr, firsts_ptr, out_ptr, twice_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = half(twice_columns)
    segment = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(firsts_ptr + segment)
    last = tl.load(firsts_ptr + segment + 1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        lanes = start + tl.arange(0, ROWS)
        row = tl.load(order_ptr + lanes, mask=lanes < last, other=0)
        mask = (lanes < last)[:, None] & (column < columns)[None, :]
        at = row[:, None] * columns + column[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        total += dy * tl.load(in2_ptr + at, mask=mask, other=0.0).to(tl.float32)
    out = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + segment * columns + column, out, mask=column < columns)


def _tile(columns: int) -> tuple[int, int]:
    width = min(COLUMNS, max(16, power_of_2(columns)))
    return TILE // width, width


@functools.cache
def _of_products(dtype: Any, other: Any, index: Any, columns: int) -> tuple[int, int, Family]:
    """Rows of a program, programs beside each other, and the launches."""
    height, width = _tile(columns)
    return height, cdiv(columns, width), Family(_products, (height, width), WARPS, fuse=False)


@functools.cache
def _of_sums(dtype: Any, other: Any, out: Any, columns: int) -> tuple[int, Family]:
    height, width = _tile(columns)
    return cdiv(columns, width), Family(_sums, (height, width), WARPS, fuse=False)


def forward(in2: torch.Tensor, in1: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Compute the result."""
    y, (size, columns), rows = torch.empty_like(in2), in2.shape, in1.shape[0]
    height, across, family = _of_products(in2.dtype, in1.dtype, index.dtype, columns)
    grid, numbers = (-(-size // height), across, 1), (size, rows, 2 * columns)
    family.launch(grid, (in2, in1, index, y), numbers, size, rows)
    return y


def backward(
    dy: torch.Tensor, needs: list[bool], *, in2: torch.Tensor, in1: torch.Tensor,
    index: torch.Tensor,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Compute the gradients of ``in2`` and ``in1`` that are needed."""
    din2 = forward(dy, in1, index) if needs[0] else None
    if not needs[1]:
        return [din2, None]
    din1, (rows, columns) = torch.empty_like(in1), in1.shape
    if rows:
        # Rows that chose the same row of ``in1`` are a segment of the sorted index. Each row of
        # ``in1`` finds where its segment begins by bisection, which gives an empty one to those
        # that none has chosen, and leaves indices out that are outside of ``in1``. So a program
        # adds up one row of the gradient, in the order of the rows of ``dy`` (the sort is stable):
        # without atomics, and with the same bits at each call.
        sorted_index, order = index.long().sort(stable=True)
        firsts = torch.searchsorted(sorted_index, torch.arange(rows + 1, device=index.device))
        across, family = _of_sums(dy.dtype, in2.dtype, din1.dtype, columns)
        family.launch((rows, across, 1), (dy, in2, order, firsts, din1), (2 * columns,))
    return [din2, din1]
