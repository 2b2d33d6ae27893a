"""The kernels of layer and RMS norm; what launches them is in :mod:`apex.kernels.row_norms`.

Load, widen to float32, compute, round once on the store.

Masks are ``column < n_cols``. Where ``n_cols`` is a multiple of 8 the compiler sees that a mask
covers whole accesses and makes them 128 bits wide (see :mod:`apex.kernels._launching`); for any
other width rows of 16 bits start off alignment and no wide access is possible.
"""

import triton
import triton.language as tl

from apex.kernels._launching import half


@triton.jit
def _mean(tile, n_cols):
    return tl.sum(tile, axis=1) / n_cols


@triton.jit
def _rstd(variance, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(variance + eps))


@triton.jit
def row_norm_forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    n_rows, twice_cols, eps,
    CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that fit into a tile."""
    n_cols = half(twice_cols)
    first = tl.program_id(0).to(tl.int64) * ROWS  # int64: first * n_cols may pass 2**31
    x_ptr += first * n_cols
    y_ptr += first * n_cols
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    row_mask = first + rows < n_rows
    inside = (cols < n_cols)[None, :]
    mask = row_mask[:, None] & inside
    offsets = rows[:, None] * n_cols + cols[None, :]  # within the tile, in 32 bits

    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        mean = _mean(x, n_cols)
        x = tl.where(inside, x - mean[:, None], 0.0)
        tl.store(mean_ptr + first + rows, mean, mask=row_mask)
    rstd = _rstd(_mean(x * x, n_cols), eps)
    tl.store(rstd_ptr + first + rows, rstd, mask=row_mask)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def row_norm_forward_wide(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    twice_cols, eps,
    CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program, in blocks; each lane keeps a running mean and sum of squares (Welford)."""
    n_cols = half(twice_cols)
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
def row_norm_backward(
    dy_ptr, saved_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    n_rows, twice_cols, eps,
    CENTERED: tl.constexpr, FROM_OUTPUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows that fit into a tile; each program takes every n-th tile and keeps partial sums."""
    n_cols = half(twice_cols)
    cols = tl.arange(0, BLOCK)
    inside = cols < n_cols
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    weight = tl.full((1, BLOCK), 1.0, tl.float32)
    inverse = weight
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=inside, other=1.0).to(tl.float32)[None, :]
        inverse = 1.0 / _away_from_zero(weight, eps)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES
    ):
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
        if dx_ptr is not None:  # else the compiler drops what only dx needs
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
    """The normalized input and ``dy * weight`` of one block of a row."""
    g = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    xhat = tl.load(saved_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=mask, other=1.0).to(tl.float32)
        g *= weight
    if FROM_OUTPUT:
        if bias_ptr is not None:
            xhat -= tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            xhat /= _away_from_zero(weight, eps)
    else:
        xhat = (xhat - mean) * rstd
    return xhat, g


@triton.jit
def row_norm_backward_wide(
    dy_ptr, saved_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, dx_ptr,
    twice_cols, eps,
    CENTERED: tl.constexpr, FROM_OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``dx`` of one row, in blocks."""
    n_cols = half(twice_cols)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if CENTERED:
        if not FROM_OUTPUT:
            mean = tl.load(mean_ptr + row)
    totals = tl.zeros((BLOCK,), tl.float32)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + lanes
        xhat, g = _block(
            dy_ptr, saved_ptr, weight_ptr, bias_ptr, row * n_cols + cols, cols, cols < n_cols,
            mean, rstd, eps, FROM_OUTPUT,
        )  # fmt: skip
        products += g * xhat  # g is 0 outside of the mask
        if CENTERED:
            totals += g
    product = tl.sum(products, axis=0) / n_cols
    total = tl.sum(totals, axis=0) / n_cols
    for start in range(0, n_cols, BLOCK):
        cols = start + lanes
        mask = cols < n_cols
        xhat, g = _block(
            dy_ptr, saved_ptr, weight_ptr, bias_ptr, row * n_cols + cols, cols, mask,
            mean, rstd, eps, FROM_OUTPUT,
        )  # fmt: skip
        dx = rstd * (g - total - xhat * product)
        tl.store(dx_ptr + row * n_cols + cols, dx, mask=mask)


@triton.jit
def row_norm_weight_sums(
    dy_ptr, saved_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, dweight_ptr, dbias_ptr,
    n_rows, twice_cols, eps,
    CENTERED: tl.constexpr, FROM_OUTPUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first stage of weight gradients, some columns of every n-th tile of rows."""
    n_cols = half(twice_cols)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_cols
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(n_rows, ROWS), tl.num_programs(1), num_stages=2):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & inside[None, :]
        offsets = rows[:, None] * n_cols + cols[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        xhat = tl.load(saved_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if not FROM_OUTPUT:
            if CENTERED:
                xhat -= tl.load(mean_ptr + rows, mask=row_mask, other=0.0)[:, None]
            xhat *= tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)[:, None]
        elif bias_ptr is not None:
            xhat -= tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        dweight += dy * xhat
        if dbias_ptr is not None:
            dbias += dy
    sums = tl.sum(dweight, axis=0)
    if FROM_OUTPUT:
        weight = tl.load(weight_ptr + cols, mask=inside, other=1.0).to(tl.float32)
        sums /= _away_from_zero(weight, eps)
    partial = tl.program_id(1).to(tl.int64) * n_cols + cols
    tl.store(dweight_ptr + partial, sums, mask=inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, axis=0), mask=inside)


@triton.jit
def row_norm_add_up(
    dweight_partial_ptr, dbias_partial_ptr, dweight_ptr, dbias_ptr, n_partials, twice_cols,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The second stage: partial sums of all programs, in a fixed order."""
    n_cols = half(twice_cols)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < n_cols
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, n_partials, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_partials)[:, None] & inside[None, :]
        offsets = rows[:, None].to(tl.int64) * n_cols + cols[None, :]
        dweight += tl.load(dweight_partial_ptr + offsets, mask=mask, other=0.0)
        if dbias_ptr is not None:
            dbias += tl.load(dbias_partial_ptr + offsets, mask=mask, other=0.0)
    tl.store(dweight_ptr + cols, tl.sum(dweight, axis=0), mask=inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + cols, tl.sum(dbias, axis=0), mask=inside)
