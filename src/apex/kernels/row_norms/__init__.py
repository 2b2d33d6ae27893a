"""Normalization of the rows of a matrix: what layer norm and RMS norm share.

    y = (x - mean) * rstd * weight + bias      CENTERED; RMS norm has no mean and no bias
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),   g = dy * weight
    dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy

A row that fits into registers is read once; a wider one is walked twice in blocks, and the second
walk finds it in the cache. Weight gradients take two stages, so that all multiprocessors work on
them and two runs give the same bits: each program adds up some of the rows in float32, and
`row_norm_add_up` the programs. Rows wider than a tile of the backward have a kernel of their own
for the first stage, which reads the matrices again: 4 bytes an element in 16 bits, where sums in
memory would be 16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from apex.kernels._launching import cdiv, empty, multiprocessors, power_of_2
from apex.kernels.row_norms.kernels import (
    row_norm_add_up,
    row_norm_backward,
    row_norm_backward_wide,
    row_norm_forward,
    row_norm_forward_wide,
    row_norm_weight_sums,
)

# A program has at most 1,024 threads: 32 warps, or 16 wavefronts on AMD.
WARPS = 16 if torch.version.hip else 32
ELEMENTS_PER_WARP = 512  # 16 elements a thread, until there are WARPS
# The widest row that a program keeps in registers. Forward that is one tile, 64 KiB, 32 elements a
# thread in 16 bits. Backward it is five tiles (dy, x, the weight and both of its gradients), 16
# elements a thread; at twice the width sm_80 to sm_100 spill. The next rows are read ahead
# (num_stages=2) unless the tile takes more than so many bytes: float32 rows of 8,192 would spill.
# Derived from the compiled code (`./dev kernels`), not yet tuned on a GPU.
WIDEST_FORWARD_BYTES = 65536
WIDEST_BACKWARD = 8192
READ_AHEAD_BYTES = 16384
# Bytes that an asynchronous copy to shared memory moves at least. Triton takes rows whose length is
# no multiple of 8 number by number; 16-bit ones read ahead would wait in registers, and spill.
LEAST_COPIED = 4
# Backward with bias and the weight's inverse in registers as well: 8 elements a thread.
WIDEST_FROM_OUTPUT, PER_WARP_FROM_OUTPUT = 4096, 256
# Wider rows go in blocks at 8 warps: two 128-bit reads of 16-bit numbers a thread; backward one,
# for with two ptxas spills in one of the variants.
WIDE_FORWARD, WIDE_BACKWARD, WIDE_WARPS = 4096, 2048, 8
SMALLEST_TILE = 2048  # narrow rows share a program: 16 elements a thread at 4 warps
TILE_ROWS, TILE_COLUMNS, TILE_WARPS = 16, 128, 4  # of the first stage for wide rows
SUM_TILE, SUM_COLUMNS = 2048, 64  # of the second stage: elements, and columns at most
ROWS_PER_PROGRAM = 8  # backward: fewer would make partial sums a large part of the traffic
# Warps of the backward that a multiprocessor holds at a time: of its 65,536 registers each thread
# has 128, which every case of the backward keeps to (tests/kernels/test_compiled.py) but for rows
# whose length is no multiple of 8, which take up to 222.
RESIDENT_WARPS = 16


# -- launching -----------------------------------------------------------------------------------


def _tile(
    n_cols: int, per_warp: int = ELEMENTS_PER_WARP, most: int = WARPS
) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps."""
    block = power_of_2(n_cols)
    rows = max(1, SMALLEST_TILE // block)
    return rows, block, min(most, rows * block // per_warp)


def _sum_tile(n_cols: int, multiprocessors: int) -> tuple[int, int]:
    """Rows and columns of a tile of the second stage: at least a program a multiprocessor.

    8 columns of float32 are what memory moves at least at a time.
    """
    columns = SUM_COLUMNS
    while columns > 8 and cdiv(n_cols, columns) < multiprocessors:
        columns //= 2
    return SUM_TILE // columns, columns


def forward(
    x: torch.Tensor, weight: Any, bias: Any, shape: Sequence[int], eps: float, centered: bool,
    dtype: torch.dtype, *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``y``, and float32, one number a row: ``mean``, empty for RMS norm, and ``rstd``."""
    n_cols, n_rows = math.prod(shape), math.prod(x.shape[: x.dim() - len(shape)])
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    mean, rstd = empty(x, n_rows if centered else 0), empty(x, n_rows)
    data = (x, weight, bias, y, mean, rstd)
    if n_cols * x.element_size() <= WIDEST_FORWARD_BYTES:
        rows, block, warps = _tile(n_cols, ELEMENTS_PER_WARP, WARPS)
        row_norm_forward[(cdiv(n_rows, rows),)](
            *data, n_rows, 2 * n_cols, eps, centered, rows, block, num_warps=warps
        )
    else:
        row_norm_forward_wide[(n_rows,)](
            *data, 2 * n_cols, eps, centered, WIDE_FORWARD, num_warps=WIDE_WARPS
        )
    return y, mean, rstd


def backward(
    dy: torch.Tensor,
    needs: Sequence[bool],
    *,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rstd: torch.Tensor,
    shape: Sequence[int],
    eps: float,
    centered: bool,
    x: torch.Tensor | None = None,
    mean: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    **dtypes: torch.dtype,
) -> list[torch.Tensor | None]:
    """Gradients of x, weight and bias; all tensors are contiguous.

    From ``x`` and ``mean``, or from the output ``y``, of which the normalized input is computed
    again: then a weight smaller than ``eps`` counts as ``eps``.
    """
    from_output = x is None
    saved = y if x is None else x
    assert saved is not None
    n_rows, n_cols, processors = rstd.numel(), math.prod(shape), multiprocessors(dy.device)
    wide = n_cols > (WIDEST_FROM_OUTPUT if from_output else WIDEST_BACKWARD)
    if wide:
        height, across = TILE_ROWS, cdiv(n_cols, TILE_COLUMNS)
        most = cdiv(processors * RESIDENT_WARPS // TILE_WARPS, across)
    else:
        per_warp = PER_WARP_FROM_OUTPUT if from_output else ELEMENTS_PER_WARP
        rows, block, warps = _tile(n_cols, per_warp, RESIDENT_WARPS)
        height, most = max(rows, ROWS_PER_PROGRAM), processors * RESIDENT_WARPS // warps
    n_programs = min(most, cdiv(n_rows, height))
    dx = dweight = dbias = of_weight = of_bias = None
    if needs[0]:
        dx = torch.empty(dy.shape, dtype=dtypes.get("x_dtype", saved.dtype), device=dy.device)
    if weight is not None and any(needs[1:]):
        dweight, of_weight = torch.empty_like(weight), empty(dy, n_programs, n_cols)
        if bias is not None:
            dbias, of_bias = torch.empty_like(bias), empty(dy, n_programs, n_cols)
    data = (dy, saved, mean, rstd, weight, bias)
    if wide:
        if dx is not None:
            row_norm_backward_wide[(n_rows,)](
                *data, dx, 2 * n_cols, eps, centered, from_output, WIDE_BACKWARD,
                num_warps=WIDE_WARPS,
            )  # fmt: skip
        if dweight is not None:
            # Columns first: CUDA takes 65,535 programs along the second axis, 8,388,480 columns.
            row_norm_weight_sums[(across, n_programs)](
                *data, of_weight, of_bias, n_rows, 2 * n_cols, eps, centered, from_output,
                TILE_ROWS, TILE_COLUMNS, num_warps=TILE_WARPS,
            )  # fmt: skip
    else:
        size = saved.element_size()
        can_copy = n_cols % 8 == 0 or size >= LEAST_COPIED
        stages = 2 if can_copy and rows * block * size <= READ_AHEAD_BYTES else 1
        row_norm_backward[(n_programs,)](
            *data, dx, of_weight, of_bias, n_rows, 2 * n_cols, eps, centered, from_output, rows,
            block, stages, num_warps=warps,
        )  # fmt: skip
    if dweight is not None:
        rows, columns = _sum_tile(n_cols, processors)
        row_norm_add_up[(cdiv(n_cols, columns),)](
            of_weight, of_bias, dweight, dbias, n_programs, 2 * n_cols, rows, columns, num_warps=4
        )
    return [dx, dweight, dbias]
