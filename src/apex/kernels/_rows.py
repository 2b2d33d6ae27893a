"""Normalization of the rows of a matrix: what layer norm and RMS norm share.

    y = (x - mean) * rstd * weight + bias      CENTERED; RMS norm has no mean and no bias
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),   g = dy * weight
    dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy

Load, widen to float32, compute, round once on the store. A row that fits into registers is read
once; a wider one is walked twice in blocks, and the second walk finds it in the cache. Weight
gradients take two stages, so that all of the chip works on them and two runs give the same bits:
each program adds up its share of the rows in float32, and a second kernel adds up the programs.

Masks are ``column < n_cols``. Where ``n_cols`` is a multiple of 16 the compiler sees that a mask
covers whole accesses and makes them 128 bits wide; for any other width rows start off alignment
and no wide access is possible.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._cases import Case

# The widest row that a program keeps in registers. Forward that is one tile: 16 elements a thread
# at 32 warps. Backward it is five (dy, x, the weight and both of its gradients), 16 elements a
# thread at 16 warps; at twice the width sm_80 to sm_100 spill. Derived from the compiled code
# (`apex kernels`), not yet tuned on a GPU.
WIDEST_FORWARD = 16384
WIDEST_BACKWARD = 8192
WIDEST_FROM_OUTPUT = 4096  # backward with bias and the weight's inverse in registers as well
# Wider rows go in blocks at 8 warps: two 128-bit reads of 16-bit numbers a thread; backward one,
# for with two ptxas spills in some of the variants.
WIDE_FORWARD, WIDE_BACKWARD, WIDE_WARPS = 4096, 2048, 8
SMALLEST_TILE = 2048  # narrow rows share a program: 16 elements a thread at 4 warps
ELEMENTS_PER_WARP = 512
SUM_COLUMNS, SUM_ROWS = 64, 32  # tile of the second stage
ROWS_PER_PROGRAM = 8  # backward: fewer would make partial sums a large part of the traffic
WAVES = 2  # programs for each multiprocessor: two at 16 warps are all that fit


@triton.jit
def _mean(tile, n_cols):
    return tl.sum(tile, axis=1) / n_cols


@triton.jit
def _rstd(variance, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(variance + eps))


@triton.jit
def forward(
    # data
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    # shape and scalars
    n_rows, n_cols, eps,
    # compile-time
    CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that fit into a tile."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    row_mask = rows < n_rows
    inside = (cols < n_cols)[None, :]
    mask = row_mask[:, None] & inside
    offsets = rows[:, None] * n_cols + cols[None, :]

    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        mean = _mean(x, n_cols)
        x = tl.where(inside, x - mean[:, None], 0.0)
        tl.store(mean_ptr + rows, mean, mask=row_mask)
    rstd = _rstd(_mean(x * x, n_cols), eps)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def forward_wide(
    # data
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    # shape and scalars
    n_cols, eps,
    # compile-time
    CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program, in blocks; each lane keeps a running mean and sum of squares (Welford)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x_ptr += row * n_cols
    y_ptr += row * n_cols

    means = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    seen = 0.0
    for start in range(0, n_cols, BLOCK):
        mask = start + lanes < n_cols
        x = tl.load(x_ptr + start + lanes, mask=mask, other=0.0).to(tl.float32)
        if CENTERED:
            seen += 1.0
            delta = x - means
            new = means + delta / seen
            squares = tl.where(mask, squares + delta * (x - new), squares)
            means = tl.where(mask, new, means)
        else:
            squares += x * x
    mean = 0.0
    if CENTERED:
        counts = n_cols // BLOCK + tl.where(lanes < n_cols % BLOCK, 1.0, 0.0)
        mean = tl.sum(means * counts, axis=0) / n_cols
        squares += counts * (means - mean) * (means - mean)
        tl.store(mean_ptr + row, mean)
    rstd = _rstd(tl.sum(squares, axis=0) / n_cols, eps)
    tl.store(rstd_ptr + row, rstd)

    for start in range(0, n_cols, BLOCK):
        mask = start + lanes < n_cols
        x = tl.load(x_ptr + start + lanes, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean) * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + start + lanes, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + start + lanes, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + start + lanes, y, mask=mask)


@triton.jit
def _away_from_zero(weight, eps):
    """What the output is divided by: a weight smaller than eps counts as eps, with its sign."""
    return tl.where(tl.abs(weight) < eps, tl.where(weight < 0, -eps, eps), weight)


@triton.jit
def backward(
    # data
    dy_ptr, saved_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    # shape and scalars
    n_rows, n_cols, eps,
    # compile-time
    CENTERED: tl.constexpr, FROM_OUTPUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that fit into a tile; each program takes every n-th tile and keeps partial sums."""
    cols = tl.arange(0, BLOCK)
    inside = cols < n_cols
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    weight = tl.full((1, BLOCK), 1.0, tl.float32)
    inverse = weight
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=inside, other=1.0).to(tl.float32)[None, :]
        inverse = 1.0 / _away_from_zero(weight, eps)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & inside[None, :]
        offsets = rows[:, None] * n_cols + cols[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        xhat = tl.load(saved_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        if FROM_OUTPUT:
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
                xhat -= bias[None, :]
            xhat *= inverse
        else:
            if CENTERED:
                mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)
                xhat = xhat - mean[:, None]
            xhat *= rstd[:, None]
        if dweight_ptr is not None:
            dweight += dy * xhat
        if dbias_ptr is not None:
            dbias += dy
        g = dy * weight
        dx = g - xhat * _mean(g * xhat, n_cols)[:, None]
        if CENTERED:
            dx -= _mean(g, n_cols)[:, None]
        tl.store(dx_ptr + offsets, dx * rstd[:, None], mask=mask)
    partial = tl.program_id(0).to(tl.int64) * n_cols + cols
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, axis=0), mask=inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, axis=0), mask=inside)


@triton.jit
def _block(
    dy_ptr, saved_ptr, weight_ptr, bias_ptr, offsets, cols, mask, mean, rstd, eps,
    FROM_OUTPUT: tl.constexpr,
):  # fmt: skip
    """``dy``, the normalized input and ``dy * weight`` of one block of a row."""
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    xhat = tl.load(saved_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    g = dy
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=mask, other=1.0).to(tl.float32)
        g = dy * weight
    if FROM_OUTPUT:
        if bias_ptr is not None:
            xhat -= tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            xhat /= _away_from_zero(weight, eps)
    else:
        xhat = (xhat - mean) * rstd
    return dy, xhat, g


@triton.jit
def backward_wide(
    # data
    dy_ptr, saved_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    # shape and scalars
    n_rows, n_cols, eps,
    # compile-time
    CENTERED: tl.constexpr, FROM_OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes every n-th row, in blocks; its partial sums stay in its own memory."""
    lanes = tl.arange(0, BLOCK)
    partial = tl.program_id(0).to(tl.int64) * n_cols
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        begin = tl.cast(row, tl.int64) * n_cols
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if CENTERED:
            if not FROM_OUTPUT:
                mean = tl.load(mean_ptr + row)
        totals = tl.zeros((BLOCK,), tl.float32)
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n_cols, BLOCK):
            cols = start + lanes
            mask = cols < n_cols
            dy, xhat, g = _block(
                dy_ptr, saved_ptr, weight_ptr, bias_ptr, begin + cols, cols, mask, mean, rstd, eps,
                FROM_OUTPUT,
            )  # fmt: skip
            products += g * xhat  # g is 0 outside of the mask
            if CENTERED:
                totals += g
        product = tl.sum(products, axis=0) / n_cols
        total = tl.sum(totals, axis=0) / n_cols
        for start in range(0, n_cols, BLOCK):
            cols = start + lanes
            mask = cols < n_cols
            dy, xhat, g = _block(
                dy_ptr, saved_ptr, weight_ptr, bias_ptr, begin + cols, cols, mask, mean, rstd, eps,
                FROM_OUTPUT,
            )  # fmt: skip
            dx = rstd * (g - total - xhat * product)
            tl.store(dx_ptr + begin + cols, dx, mask=mask)
            first = row < tl.num_programs(0)
            if dweight_ptr is not None:
                here = dweight_ptr + partial + cols
                before = tl.load(here, mask=mask & (not first), other=0.0)
                tl.store(here, before + dy * xhat, mask=mask)
            if dbias_ptr is not None:
                here = dbias_ptr + partial + cols
                before = tl.load(here, mask=mask & (not first), other=0.0)
                tl.store(here, before + dy, mask=mask)


@triton.jit
def _column_sums(partial_ptr, out_ptr, n_partials, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_cols
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, n_partials, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_partials)[:, None] & inside[None, :]
        offsets = rows[:, None].to(tl.int64) * n_cols + cols[None, :]
        sums += tl.load(partial_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(sums, axis=0), mask=inside)


@triton.jit
def add_up(
    dweight_partial_ptr, dbias_partial_ptr, dweight_ptr, dbias_ptr, n_partials, n_cols,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The second stage: partial sums of all programs, in a fixed order."""
    _column_sums(dweight_partial_ptr, dweight_ptr, n_partials, n_cols, ROWS, BLOCK)
    if dbias_ptr is not None:
        _column_sums(dbias_partial_ptr, dbias_ptr, n_partials, n_cols, ROWS, BLOCK)


# -- launching -----------------------------------------------------------------------------------


def _tile(n_cols: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps."""
    block = triton.next_power_of_2(n_cols)
    rows = max(1, SMALLEST_TILE // block)
    return rows, block, min(32, rows * block // ELEMENTS_PER_WARP)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter: enough for more than one partial sum
    return torch.cuda.get_device_properties(device).multi_processor_count


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device if device.type == "cuda" else -1)  # -1 does nothing


def launch_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
    *,
    centered: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Normalize contiguous ``x`` ``(rows, columns)``.

    Returns:
        ``y`` of ``dtype``, and float32 ``(rows,)``: the mean if ``centered``, and ``1 / sigma``.
    """
    n_rows, n_cols = x.shape
    y = torch.empty_like(x, dtype=dtype)
    rstd = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centered else None
    data = (x, weight, bias, y, mean, rstd)
    with _on(x.device):
        if n_cols <= WIDEST_FORWARD:
            rows, block, warps = _tile(n_cols)
            forward[(triton.cdiv(n_rows, rows),)](
                *data, n_rows, n_cols, eps, centered, rows, block, num_warps=warps
            )
        else:
            forward_wide[(n_rows,)](
                *data, n_cols, eps, centered, WIDE_FORWARD, num_warps=WIDE_WARPS
            )
    return y, mean, rstd


def launch_backward(
    dy: torch.Tensor,
    saved: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
    *,
    centered: bool,
    from_output: bool,
    weight_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of :func:`launch_forward`; all matrices contiguous ``(rows, columns)``.

    Args:
        dy: Gradient of the output.
        saved: The input; the output if ``from_output``.
        mean: Of each row, float32; not needed ``from_output``.
        rstd: Of each row, float32.
        weight: As in the forward.
        bias: As in the forward.
        eps: As in the forward; ``from_output`` also the least that the output is divided by.
        dtype: Of the input's gradient.
        centered: Layer norm rather than RMS norm.
        from_output: Whether ``saved`` is the output.
        weight_gradients: Whether those of weight and bias are wanted.

    Returns:
        Gradients of input, weight and bias.
    """
    n_rows, n_cols = dy.shape
    rows, block, warps = _tile(n_cols)
    wide = n_cols > (WIDEST_FROM_OUTPUT if from_output else WIDEST_BACKWARD)
    most = WAVES * _multiprocessors(dy.device) * (16 // min(warps, 16))
    n_programs = min(most, triton.cdiv(n_rows, 1 if wide else max(rows, ROWS_PER_PROGRAM)))
    dx = torch.empty_like(dy, dtype=dtype)
    wanted = weight is not None and weight_gradients
    dweight = torch.empty_like(weight) if weight is not None and wanted else None
    dbias = torch.empty_like(bias) if bias is not None and wanted else None
    sums = dy.new_empty((2, n_programs, n_cols), dtype=torch.float32) if wanted else None
    partials = (
        sums[0] if sums is not None else None,
        sums[1] if sums is not None and dbias is not None else None,
    )
    data = (dy, saved, mean, rstd, weight, bias, dx, *partials)
    numbers = (n_rows, n_cols, eps, centered, from_output)
    with _on(dy.device):
        if wide:
            backward_wide[(n_programs,)](*data, *numbers, WIDE_BACKWARD, num_warps=WIDE_WARPS)
        else:
            backward[(n_programs,)](*data, *numbers, rows, block, num_warps=warps)
        if dweight is not None:
            add_up[(triton.cdiv(n_cols, SUM_COLUMNS),)](
                *partials, dweight, dbias, n_programs, n_cols, SUM_ROWS, SUM_COLUMNS, num_warps=4
            )
    return dx, dweight, dbias


# -- what is inspected ---------------------------------------------------------------------------

TYPES = ("fp32", "fp16", "bf16")
STATISTICS = "one number a row"
SHARED_ROW = "one row for several of the tile"


def cases(name: str, *, centered: bool) -> Iterator[Case]:
    """Cases of every kernel, as layer norm or as RMS norm."""
    for kind in TYPES:
        yield from _forward_cases(name, kind, kind, kind, centered)
        yield from _backward_cases(name, kind, kind, kind, centered)
    for dtypes in (("fp32", "bf16", "bf16"), ("fp32", "fp16", "fp16")):
        yield from _forward_cases(name, *dtypes, centered)
        yield from _backward_cases(name, *dtypes, centered)
    for kind in ("fp32", "bf16"):
        yield _add_up_case(name, kind, centered)


def _constants(pointers: dict[str, str | None], **values: Any) -> dict[str, Any]:
    return {key: None for key, kind in pointers.items() if kind is None} | values


def _signature(pointers: dict[str, str | None], numbers: Sequence[str]) -> dict[str, str]:
    given = {key: f"*{kind}" for key, kind in pointers.items() if kind is not None}
    return given | dict.fromkeys(numbers, "i32") | {"eps": "fp32"}


def _present(pointers: dict[str, str | None], *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if pointers[name] is not None)


def _forward_cases(name: str, x: str, weight: str, y: str, centered: bool) -> Iterator[Case]:
    for affine in (True, False) if x == y else (True,):
        pointers = {
            "x_ptr": x, "weight_ptr": weight if affine else None,
            "bias_ptr": weight if affine and centered else None, "y_ptr": y,
            "mean_ptr": "fp32" if centered else None, "rstd_ptr": "fp32",
        }  # fmt: skip
        rows_of_weights = _present(pointers, "weight_ptr", "bias_ptr")
        narrow = dict.fromkeys(_present(pointers, "mean_ptr", "rstd_ptr"), STATISTICS)
        words = f"{x} {weight} {y}" if affine else f"{x} plain"
        for columns in (1024, WIDEST_FORWARD):
            rows, block, warps = _tile(columns)
            shared = dict.fromkeys(rows_of_weights, SHARED_ROW) if rows > 1 else {}
            yield Case(
                forward, name, f"forward {columns} {words}",
                signature=_signature(pointers, ("n_rows", "n_cols")),
                constants=_constants(pointers, CENTERED=centered, ROWS=rows, BLOCK=block),
                reads=("x_ptr", *(() if shared else rows_of_weights)), writes=("y_ptr",),
                tile=rows * block, narrow=narrow | shared, divisible=("n_cols",),
                options={"num_warps": warps},
            )  # fmt: skip
        yield Case(
            forward_wide, name, f"forward wide {words}",
            signature=_signature(pointers, ("n_cols",)),
            constants=_constants(pointers, CENTERED=centered, BLOCK=WIDE_FORWARD),
            reads=("x_ptr", *rows_of_weights), writes=("y_ptr",),
            tile=WIDE_FORWARD, narrow=narrow, divisible=("n_cols",),
            options={"num_warps": WIDE_WARPS},
        )  # fmt: skip


def _backward_cases(name: str, x: str, weight: str, y: str, centered: bool) -> Iterator[Case]:
    ways = [("", True, False), (" from output", True, True)]
    for word, affine, from_output in [*ways, (" plain", False, False)]:
        partial = "fp32" if affine else None
        pointers = {
            "dy_ptr": y, "saved_ptr": y if from_output else x,
            "mean_ptr": "fp32" if centered and not from_output else None, "rstd_ptr": "fp32",
            "weight_ptr": weight if affine else None,
            "bias_ptr": weight if affine and centered else None, "dx_ptr": x,
            "dweight_ptr": partial, "dbias_ptr": partial if centered else None,
        }  # fmt: skip
        rows_of_weights = _present(pointers, "weight_ptr", *["bias_ptr"] * from_output)
        sums = _present(pointers, "dweight_ptr", "dbias_ptr")
        narrow = dict.fromkeys(_present(pointers, "mean_ptr", "rstd_ptr"), STATISTICS)
        words = f"{x} {weight} {y}{word}"
        for columns in (1024, WIDEST_FROM_OUTPUT if from_output else WIDEST_BACKWARD):
            rows, block, warps = _tile(columns)
            once = rows_of_weights + sums if rows > 1 else ()
            yield Case(
                backward, name, f"backward {columns} {words}",
                signature=_signature(pointers, ("n_rows", "n_cols")),
                constants=_constants(
                    pointers, CENTERED=centered, FROM_OUTPUT=from_output, ROWS=rows, BLOCK=block
                ),
                reads=("dy_ptr", "saved_ptr", *(() if once else rows_of_weights)),
                writes=("dx_ptr", *(() if once else sums)), tile=rows * block,
                narrow=narrow | dict.fromkeys(once, SHARED_ROW), divisible=("n_cols",),
                options={"num_warps": warps},
            )  # fmt: skip
        yield Case(
            backward_wide, name, f"backward wide {words}",
            signature=_signature(pointers, ("n_rows", "n_cols")),
            constants=_constants(
                pointers, CENTERED=centered, FROM_OUTPUT=from_output, BLOCK=WIDE_BACKWARD
            ),
            reads=("dy_ptr", "saved_ptr", *rows_of_weights, *sums), writes=("dx_ptr", *sums),
            tile=WIDE_BACKWARD, narrow=narrow, divisible=("n_cols",),
            options={"num_warps": WIDE_WARPS},
        )  # fmt: skip


def _add_up_case(name: str, kind: str, centered: bool) -> Case:
    pointers = {
        "dweight_partial_ptr": "fp32", "dbias_partial_ptr": "fp32" if centered else None,
        "dweight_ptr": kind, "dbias_ptr": kind if centered else None,
    }  # fmt: skip
    signature = _signature(pointers, ("n_partials", "n_cols"))
    del signature["eps"]
    return Case(
        add_up, name, f"second stage {kind}",
        signature=signature,
        constants=_constants(pointers, ROWS=SUM_ROWS, BLOCK=SUM_COLUMNS),
        reads=_present(pointers, "dweight_partial_ptr", "dbias_partial_ptr"), writes=(),
        tile=SUM_ROWS * SUM_COLUMNS,
        narrow=dict.fromkeys(_present(pointers, "dweight_ptr", "dbias_ptr"), "one row in all"),
        divisible=("n_cols",), options={"num_warps": 4},
    )  # fmt: skip
