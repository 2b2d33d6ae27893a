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

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton

from apex.kernels._device import multiprocessors
from apex.kernels.inspect.case import BITS, Case
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
# Derived from the compiled code (`apex kernels`), not yet tuned on a GPU.
WIDEST_FORWARD_BYTES = 65536
WIDEST_BACKWARD = 8192
READ_AHEAD_BYTES = 16384
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
# has 128, which every case of the backward keeps to (tests/kernels/test_compiled.py).
RESIDENT_WARPS = 16


# -- launching -----------------------------------------------------------------------------------


@functools.cache
def _tile(n_cols: int, per_warp: int = ELEMENTS_PER_WARP) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps."""
    block = triton.next_power_of_2(n_cols)
    rows = max(1, SMALLEST_TILE // block)
    return rows, block, min(WARPS, rows * block // per_warp)


@functools.cache
def _backward_tile(n_cols: int, from_output: bool) -> tuple[int, int, int]:
    per_warp = PER_WARP_FROM_OUTPUT if from_output else ELEMENTS_PER_WARP
    rows, block, warps = _tile(n_cols, per_warp)
    return rows, block, min(warps, RESIDENT_WARPS)


def _stages(elements: int, size: int) -> int:
    return 2 if elements * size <= READ_AHEAD_BYTES else 1


@functools.cache
def _sum_tile(n_cols: int, multiprocessors: int) -> tuple[int, int]:
    """Rows and columns of a tile of the second stage: at least a program a multiprocessor.

    8 columns of float32 are what memory moves at least at a time.
    """
    columns = SUM_COLUMNS
    while columns > 8 and triton.cdiv(n_cols, columns) < multiprocessors:
        columns //= 2
    return SUM_TILE // columns, columns


def allocate(
    x: torch.Tensor, weight: Any, bias: Any, shape: Sequence[int], eps: float, centered: bool,
    dtype: torch.dtype, *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``y``, and float32, one number a row: ``mean``, empty for RMS norm, and ``rstd``."""
    n_rows = math.prod(x.shape[: x.dim() - len(shape)])
    rstd = x.new_empty(n_rows, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), rstd.new_empty(n_rows if centered else 0), rstd


def forward(
    x: torch.Tensor, weight: Any, bias: Any, shape: Sequence[int], eps: float, centered: bool,
    dtype: torch.dtype, *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """As :func:`allocate`, computed; ``x`` is contiguous."""
    n_cols = math.prod(shape)
    y, mean, rstd = allocate(x, weight, bias, shape, eps, centered, dtype)
    n_rows = rstd.numel()
    data = (x, weight, bias, y, mean, rstd)
    if n_cols * x.element_size() <= WIDEST_FORWARD_BYTES:
        rows, block, warps = _tile(n_cols)
        row_norm_forward[(triton.cdiv(n_rows, rows),)](
            *data, n_rows, n_cols, eps, centered, rows, block, num_warps=warps
        )
    else:
        row_norm_forward_wide[(n_rows,)](
            *data, n_cols, eps, centered, WIDE_FORWARD, num_warps=WIDE_WARPS
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
    n_rows, n_cols = rstd.numel(), math.prod(shape)
    rows, block, warps = _backward_tile(n_cols, from_output)
    wide = n_cols > (WIDEST_FROM_OUTPUT if from_output else WIDEST_BACKWARD)
    processors = multiprocessors(dy.device)
    if wide:
        height, across = TILE_ROWS, triton.cdiv(n_cols, TILE_COLUMNS)
        most = triton.cdiv(processors * RESIDENT_WARPS // TILE_WARPS, across)
    else:
        height, most = max(rows, ROWS_PER_PROGRAM), processors * RESIDENT_WARPS // warps
    n_programs = min(most, triton.cdiv(n_rows, height))
    dx = dy.new_empty(dy.shape, dtype=dtypes.get("x_dtype", saved.dtype)) if needs[0] else None
    dweight = torch.empty_like(weight) if weight is not None and any(needs[1:]) else None
    dbias = torch.empty_like(bias) if bias is not None and dweight is not None else None
    sums = dy.new_empty((2, n_programs, n_cols), dtype=torch.float32)
    partials = (None if dweight is None else sums[0], None if dbias is None else sums[1])
    data = (dy, saved, mean, rstd, weight, bias)
    if wide:
        if dx is not None:
            row_norm_backward_wide[(n_rows,)](
                *data, dx, n_cols, eps, centered, from_output, WIDE_BACKWARD, num_warps=WIDE_WARPS
            )
        if dweight is not None:
            # Columns first: CUDA takes 65,535 programs along the second axis, 8,388,480 columns.
            row_norm_weight_sums[(across, n_programs)](
                *data, *partials, n_rows, n_cols, eps, centered, from_output, TILE_ROWS,
                TILE_COLUMNS, num_warps=TILE_WARPS,
            )  # fmt: skip
    else:
        row_norm_backward[(n_programs,)](
            *data, dx, *partials, n_rows, n_cols, eps, centered, from_output, rows, block,
            _stages(rows * block, saved.element_size()), num_warps=warps,
        )  # fmt: skip
    if dweight is not None:
        rows, columns = _sum_tile(n_cols, processors)
        row_norm_add_up[(triton.cdiv(n_cols, columns),)](
            *partials, dweight, dbias, n_programs, n_cols, rows, columns, num_warps=4
        )
    return [dx, dweight, dbias]


# -- what is inspected ---------------------------------------------------------------------------

STATISTICS = "one number a row"
SHARED_ROW = "one row for several of the tile"


def cases() -> Iterator[Case]:
    """What is inspected: types of x, weight and y."""
    same = [(kind, kind, kind) for kind in ("fp32", "fp16", "bf16")]
    for name, centered in (("layer_norm", True), ("rms_norm", False)):
        for types in [*same, ("fp32", "bf16", "bf16"), ("fp32", "fp16", "fp16")]:
            for affine in (True, False) if types in same else (True,):
                yield from _forward_cases(name, *types, affine, centered)
                yield from _backward_cases(name, *types, affine, False, centered)
            yield from _backward_cases(name, *types, True, True, centered)
        yield from (_add_up_case(name, kind, centered) for kind in ("fp32", "bf16"))


def _case(
    kernel: Any,
    name: str,
    variant: str,
    pointers: dict[str, str | None],
    *,
    tile: tuple[int, int],
    warps: int,
    reads: Sequence[str],
    writes: Sequence[str] = (),
    narrow: dict[str, str],
    **constants: Any,
) -> Case:
    """A case whose pointers are those of ``pointers`` that have a type."""
    numbers = [n for n in ("n_rows", "n_partials", "n_cols") if n in kernel.arg_names]
    signature = {key: f"*{kind}" for key, kind in pointers.items() if kind is not None}
    signature |= dict.fromkeys(numbers, "i32")
    if "eps" in kernel.arg_names:
        signature["eps"] = "fp32"
    if "ROWS" in kernel.arg_names:
        constants["ROWS"] = tile[0]
    present = {key for key, kind in pointers.items() if kind is not None}
    return Case(
        kernel, name, variant, signature=signature,
        constants=dict.fromkeys(pointers.keys() - present) | {"BLOCK": tile[1]} | constants,
        reads=tuple(key for key in reads if key in present and key not in narrow),
        writes=tuple(key for key in writes if key in present and key not in narrow),
        narrow={key: why for key, why in narrow.items() if key in present},
        tile=tile[0] * tile[1], divisible=("n_cols",), options={"num_warps": warps},
        amd={"num_warps": min(warps, 16)},
    )  # fmt: skip


def _forward_cases(
    name: str, x: str, weight: str, y: str, affine: bool, centered: bool
) -> Iterator[Case]:
    pointers = {
        "x_ptr": x, "weight_ptr": weight if affine else None,
        "bias_ptr": weight if affine and centered else None, "y_ptr": y,
        "mean_ptr": "fp32" if centered else None, "rstd_ptr": "fp32",
    }  # fmt: skip
    words = f"{x} {weight} {y}" if affine else f"{x} plain"
    reads, writes = ("x_ptr", "weight_ptr", "bias_ptr"), ("y_ptr",)
    narrow = dict.fromkeys(("mean_ptr", "rstd_ptr"), STATISTICS)
    for columns in (1024, WIDEST_FORWARD_BYTES * 8 // BITS[x]):
        rows, block, warps = _tile(columns)
        shared = dict.fromkeys(("weight_ptr", "bias_ptr"), SHARED_ROW) if rows > 1 else {}
        yield _case(
            row_norm_forward, name, f"forward {columns} {words}", pointers, tile=(rows, block),
            warps=warps, reads=reads, writes=writes, narrow=narrow | shared, CENTERED=centered,
        )  # fmt: skip
    yield _case(
        row_norm_forward_wide, name, f"forward wide {words}", pointers, tile=(1, WIDE_FORWARD),
        warps=WIDE_WARPS, reads=reads, writes=writes, narrow=narrow, CENTERED=centered,
    )  # fmt: skip


def _backward_cases(
    name: str, x: str, weight: str, y: str, affine: bool, from_output: bool, centered: bool
) -> Iterator[Case]:
    matrices = {
        "dy_ptr": y, "saved_ptr": y if from_output else x,
        "mean_ptr": "fp32" if centered and not from_output else None, "rstd_ptr": "fp32",
        "weight_ptr": weight if affine else None,
        "bias_ptr": weight if affine and centered else None,
    }  # fmt: skip
    sums = {"dweight_ptr": "fp32" if affine else None}
    sums["dbias_ptr"] = "fp32" if affine and centered else None
    if not from_output:  # only its address says whether there is a bias
        matrices["bias_ptr"] = None
    words = f"{x} {weight} {y}{' from output' if from_output else '' if affine else ' plain'}"
    flags: dict[str, Any] = {"CENTERED": centered, "FROM_OUTPUT": from_output}
    reads = ("dy_ptr", "saved_ptr", "weight_ptr", "bias_ptr")
    narrow = dict.fromkeys(("mean_ptr", "rstd_ptr"), STATISTICS)
    for columns in (1024, WIDEST_FROM_OUTPUT if from_output else WIDEST_BACKWARD):
        rows, block, warps = _backward_tile(columns, from_output)
        once = ("weight_ptr", "bias_ptr", *sums) if rows > 1 else ()
        yield _case(
            row_norm_backward, name, f"backward {columns} {words}", matrices | {"dx_ptr": x} | sums,
            tile=(rows, block), warps=warps, reads=reads, writes=("dx_ptr", *sums),
            narrow=narrow | dict.fromkeys(once, SHARED_ROW), **flags,
            STAGES=_stages(rows * block, BITS[y if from_output else x] // 8),
        )  # fmt: skip
    yield _case(
        row_norm_backward_wide, name, f"backward wide {words}", matrices | {"dx_ptr": x},
        tile=(1, WIDE_BACKWARD), warps=WIDE_WARPS, reads=reads, writes=("dx_ptr",), narrow=narrow,
        **flags,
    )  # fmt: skip
    if affine:
        once = ("weight_ptr", "bias_ptr", *sums)
        yield _case(
            row_norm_weight_sums, name, f"weight sums {words}", matrices | sums,
            tile=(TILE_ROWS, TILE_COLUMNS), warps=TILE_WARPS, reads=reads[:2],
            narrow=narrow | dict.fromkeys(once, SHARED_ROW), **flags,
        )  # fmt: skip


def _add_up_case(name: str, kind: str, centered: bool) -> Case:
    partials = {"dweight_partial_ptr": "fp32", "dbias_partial_ptr": "fp32" if centered else None}
    sums = {"dweight_ptr": kind, "dbias_ptr": kind if centered else None}
    return _case(
        row_norm_add_up, name, f"second stage {kind}", partials | sums, tile=_sum_tile(1024, 132),
        warps=4, reads=tuple(partials), narrow=dict.fromkeys(sums, "one row in all"),
    )  # fmt: skip
