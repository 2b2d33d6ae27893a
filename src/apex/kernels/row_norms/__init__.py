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
from typing import Any, NamedTuple

import torch

from apex.kernels._launching import cdiv, multiprocessors, power_of_2
from apex.kernels._plans import Family
from apex.kernels._settings import kept, setting
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


def _name(centered: bool, of: str) -> str:
    """What the table of settings calls a part of a norm."""
    return f"{'layer' if centered else 'rms'}_norm_{of}"


@kept
def _of_forward(
    n_cols: int, size: int, centered: bool, dtype: torch.dtype, *dtypes: torch.dtype | None
) -> tuple[int, Family]:
    """Rows of a program, and its launches; no rows: a row goes in blocks. ``size``: of elements."""
    rows, block, warps = _tile(n_cols)
    whole, elements = int(n_cols * size <= WIDEST_FORWARD_BYTES), rows * block
    if not whole:
        elements, warps = WIDE_FORWARD, WIDE_WARPS
    whole, elements, warps = setting(
        _name(centered, "forward"), dtype, (n_cols,), whole=whole, elements=elements, warps=warps
    )
    if not whole:
        return 0, Family(row_norm_forward_wide, (centered, elements), warps)
    rows = elements // block
    return rows, Family(row_norm_forward, (centered, rows, block), warps)


class _Backward(NamedTuple):
    """How the backward of rows is cut: ``height`` rows a program at least, ``most`` programs."""

    height: int
    most: int
    across: int  # programs beside each other, of the weight sums of wide rows
    rows: Family  # the gradient of the input; of rows that fit into a tile weight sums, too
    sums: Family | None  # weight sums of wide rows
    total: Family  # the second stage
    total_grid: tuple[int, int, int]


def _cut_backward(
    n_cols: int, centered: bool, from_output: bool, dtype: torch.dtype
) -> tuple[int, ...]:
    """Whether tiles have whole rows; elements of one, warps, stages; programs a multiprocessor."""
    most = WIDEST_FROM_OUTPUT if from_output else WIDEST_BACKWARD
    per_warp = PER_WARP_FROM_OUTPUT if from_output else ELEMENTS_PER_WARP
    rows, block, warps = _tile(n_cols, per_warp, RESIDENT_WARPS)
    whole, elements, stages = int(n_cols <= most), rows * block, 1
    if not whole:
        elements, warps = WIDE_BACKWARD, WIDE_WARPS
    elif (n_cols % 8 == 0 or dtype.itemsize >= LEAST_COPIED) and (
        elements * dtype.itemsize <= READ_AHEAD_BYTES
    ):
        stages = 2
    end = "_from_output" if from_output else ""
    return setting(
        _name(centered, f"backward{end}"), dtype, (n_cols,), whole=whole, elements=elements,
        warps=warps, stages=stages, programs=RESIDENT_WARPS // warps,
    )  # fmt: skip


@kept
def _of_backward(
    n_cols: int, centered: bool, from_output: bool, processors: int, dtype: torch.dtype,
    *kinds: torch.dtype | bool | None,
) -> _Backward:  # fmt: skip
    """``dtype``: of what was saved; ``kinds``: the others, and which gradients are needed."""
    height, columns = _sum_tile(n_cols, processors)
    total = Family(row_norm_add_up, (height, columns))
    total_grid = (cdiv(n_cols, columns), 1, 1)
    how = (centered, from_output)
    whole, elements, warps, stages, programs = _cut_backward(n_cols, *how, dtype)
    if not whole:
        rows_of = Family(row_norm_backward_wide, (*how, elements), warps)
        width, elements, warps, programs = setting(
            _name(centered, "weight_sums"), dtype, (n_cols,), width=TILE_COLUMNS,
            elements=TILE_ROWS * TILE_COLUMNS, warps=TILE_WARPS,
            programs=RESIDENT_WARPS // TILE_WARPS,
        )  # fmt: skip
        height, across = elements // width, cdiv(n_cols, width)
        sums = Family(row_norm_weight_sums, (*how, height, width), warps)
        most = cdiv(processors * programs, across)
        return _Backward(height, most, across, rows_of, sums, total, total_grid)
    block = power_of_2(n_cols)
    rows = elements // block
    height, most = max(rows, ROWS_PER_PROGRAM), processors * programs
    rows_of = Family(row_norm_backward, (*how, rows, block, stages or None), warps)
    return _Backward(height, most, 1, rows_of, None, total, total_grid)


def forward(
    x: torch.Tensor, weight: Any, bias: Any, shape: Sequence[int], eps: float, centered: bool,
    dtype: torch.dtype, *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``y``, and float32, one number a row: ``mean``, empty for RMS norm, and ``rstd``."""
    n_cols = math.prod(shape)
    n_rows = x.numel() // n_cols
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    mean = rstd.new_empty(n_rows if centered else 0)
    data = (x, weight, bias, y, mean, rstd)
    weight_dtype = None if weight is None else weight.dtype
    bias_dtype = None if bias is None else bias.dtype
    kinds = (x.dtype, weight_dtype, bias_dtype, dtype)
    rows, family = _of_forward(n_cols, x.element_size(), centered, *kinds)
    eps = float(eps)
    if rows:
        family.launch((-(-n_rows // rows), 1, 1), data, (n_rows, 2 * n_cols, eps), n_rows)
    else:
        family.launch((n_rows, 1, 1), data, (2 * n_cols, eps))
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
    n_rows, n_cols = rstd.numel(), math.prod(shape)
    wants_weights = weight is not None and any(needs[1:])
    kinds = (
        saved.dtype, dy.dtype, rstd.dtype, None if mean is None else mean.dtype,
        None if weight is None else weight.dtype, None if bias is None else bias.dtype,
        dtypes.get("x_dtype"), needs[0], wants_weights,
    )  # fmt: skip
    processors = multiprocessors(dy.device)
    cut = _of_backward(n_cols, centered, from_output, processors, *kinds)
    n_programs = min(cut.most, -(-n_rows // cut.height))
    dx = dweight = dbias = of_weight = of_bias = None
    if needs[0]:
        to = dtypes.get("x_dtype", saved.dtype)
        dx = torch.empty_like(dy, dtype=to, memory_format=torch.contiguous_format)
    if weight is not None and wants_weights:
        dweight = torch.empty_like(weight)
        # Of sizes that are passed as a tuple an allocation takes twice as long on the host.
        of_weight = dy.new_empty(n_programs * n_cols, dtype=torch.float32)
        if bias is not None:
            dbias = torch.empty_like(bias)
            of_bias = of_weight.new_empty(n_programs * n_cols)
    data = (dy, saved, mean, rstd, weight, bias)
    numbers = (n_rows, 2 * n_cols, float(eps))
    if cut.sums is None:
        tensors = (*data, dx, of_weight, of_bias)
        cut.rows.launch((n_programs, 1, 1), tensors, numbers, n_rows)
    elif dx is not None:
        cut.rows.launch((n_rows, 1, 1), (*data, dx), numbers[1:])
    if dweight is not None:
        if cut.sums is not None:
            # Columns first: CUDA takes 65,535 programs along the second axis, 8,388,480 columns.
            columns = (*data, of_weight, of_bias)
            cut.sums.launch((cut.across, n_programs, 1), columns, numbers, n_rows)
        partial = (of_weight, of_bias, dweight, dbias)
        cut.total.launch(cut.total_grid, partial, (n_programs, 2 * n_cols), n_programs)
    return [dx, dweight, dbias]
