"""Focal loss, forward and backward: each program computes one block of elements.

See :mod:`apex.ops.losses.focal_loss` for the definition. Programs of the forward leave partial
sums, which ``torch.sum`` adds up in the same order every time. The number of columns is known to
the compiler, which makes multiplications of the divisions that find an element's row.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._plans import Family

BLOCK = 1024  # 4 warps of 32 lanes, 128 bits of 16-bit logits each
LANE = 8  # neighbours that one thread reads of them
# 8 elements a thread spill on sm_80 with a row for each, and in the backward of float32.
WARPS, ALONE_WARPS = 4, 8


@triton.jit
def _factors(u, gamma, smoothing, SMOOTH: tl.constexpr, SQUARE: tl.constexpr):
    """``sigmoid(u)``, ``sigmoid(-u)``, ``sigmoid(u)**gamma``, and the cross-entropy.

    One exponential gives all of them. `tl.exp2` and a square of `tl.rsqrt` would save 6 of some 60
    instructions an element, and lose 2 roundings of float32 in each sigmoid.
    """
    small = tl.exp(-tl.abs(u))
    # log1p(x) / x, interpolated at Chebyshev's nodes of [0, 1]: in float32 within 2.1 * 2**-24.
    log = -0.0031760570127516985 * small + 0.019542526453733444
    log = log * small - 0.056373611092567444
    log = log * small + 0.10543623566627502
    log = log * small - 0.1526966691017151
    log = log * small + 0.1966327428817749
    log = log * small - 0.24951615929603577
    log = log * small + 0.33329710364341736
    log = log * small - 0.49999892711639404
    log = (log * small + 1.0) * small
    positive = tl.maximum(u, 0.0)
    loss = positive + log
    if SMOOTH:
        loss -= 0.5 * smoothing * u
    more = 1.0 / (1.0 + small)
    less = small * more
    p, rest = tl.where(u >= 0, more, less), tl.where(u >= 0, less, more)
    power = p * p if SQUARE else tl.exp2(gamma * 1.4426950408889634 * ((u - positive) - log))
    return p, rest, power, loss


@triton.jit
def _row(targets_ptr, row, classes):
    """Target of a row, or -1 for no class; how many columns count; 1, or nan for no such target."""
    target = tl.load(targets_ptr + row).to(tl.int64)
    inside = (target >= 0) & (target < classes)
    factor = tl.where(inside | (target == -1) | (target == -2), 1.0, float("nan"))
    return tl.where(inside, target, -1).to(tl.int32), tl.where(target == -2, 0, classes), factor


@triton.jit
def _block(
    logits_ptr, targets_ptr, dy_ptr, positives_ptr, out_ptr, start, offsets, mask,
    size, classes, alpha, gamma, smoothing,
    COLUMNS: tl.constexpr, SMOOTH: tl.constexpr, SQUARE: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Return the sum of a block's terms, or write their gradients, if there is an ``out_ptr``.

    ``LANE`` neighbours lie in at most two rows, so that two targets are read for all of them.
    """
    x = tl.load(logits_ptr + offsets, mask).to(tl.float32)
    at = (start % COLUMNS).to(tl.int32) + tl.arange(0, offsets.shape[0]) * LANE
    column, row = at % COLUMNS, start // COLUMNS + at // COLUMNS
    last = size // COLUMNS - 1
    target, many, factor = _row(targets_ptr, tl.minimum(row, last), classes)
    target_2, many_2, factor_2 = _row(targets_ptr, tl.minimum(row + 1, last), classes)
    left = COLUMNS - column  # in the first row
    target = tl.where(target < 0, -1, target - column)
    target_2 = tl.where(target_2 < 0, -1, target_2 + left)
    lane = tl.arange(0, LANE)[None, :]
    first = lane < left[:, None]
    same = (lane == target[:, None]) | (lane == target_2[:, None])
    counts = lane < tl.where(first, (many - column)[:, None], (many_2 + left)[:, None])
    if mask is not None:
        counts = counts & mask
    weight = tl.where(same, alpha, 1.0 - alpha)
    if out_ptr is not None:
        scale = tl.load(dy_ptr).to(tl.float32) / tl.load(positives_ptr).to(tl.float32)
        weight = scale * tl.where(same, -weight, weight)
    weight *= tl.where(first, factor[:, None], factor_2[:, None])
    weight = tl.where(counts, weight, 0.0)  # and the rest of the product is finite: u is 0, too
    u = tl.where(counts, tl.where(same, -x, x), 0.0)
    p, rest, power, loss = _factors(u, gamma, smoothing, SMOOTH, SQUARE)
    total = 0.0
    if out_ptr is None:
        total = tl.sum(weight * (power * loss))
    else:
        slope = gamma * rest * loss + p
        if SMOOTH:
            slope -= 0.5 * smoothing
        out = weight * (power * slope)
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask)
    return total


@triton.jit
def _focal_loss(
    logits_ptr, targets_ptr, sums_ptr, dy_ptr, positives_ptr, out_ptr,
    size, classes, alpha, gamma, smoothing,
    COLUMNS: tl.constexpr, SMOOTH: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
    LANE: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    if start + BLOCK <= size:  # so that accesses without a mask are 128 bits wide
        total = _block(
            logits_ptr, targets_ptr, dy_ptr, positives_ptr, out_ptr, start, offsets, None,
            size, classes, alpha, gamma, smoothing, COLUMNS, SMOOTH, SQUARE, LANE,
        )  # fmt: skip
    else:
        total = _block(
            logits_ptr, targets_ptr, dy_ptr, positives_ptr, out_ptr, start, offsets,
            offsets < size, size, classes, alpha, gamma, smoothing, COLUMNS, SMOOTH, SQUARE, LANE,
        )  # fmt: skip
    if sums_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0), total)


@functools.cache
def _family(columns: int, smooth: bool, square: bool, kinds: Any) -> Family:
    lane, warps = (LANE, WARPS) if columns >= LANE else (1, ALONE_WARPS)  # in at most two rows
    if len(kinds) > 2 and kinds[0] == torch.float32:  # backward; a forward has 16 % more to do
        warps = ALONE_WARPS
    return Family(_focal_loss, (columns, smooth, square, BLOCK, lane), warps)


def forward(
    logits: torch.Tensor, targets: torch.Tensor, num_positives: torch.Tensor,
    classes: int, alpha: float, gamma: float, smoothing: float,
) -> torch.Tensor:  # fmt: skip
    """Compute the loss."""
    size, columns = logits.numel(), logits.shape[-1]
    programs = -(-size // BLOCK)
    sums = logits.new_empty(programs, dtype=torch.float32)
    kinds = (logits.dtype, targets.dtype)
    family = _family(columns, smoothing != 0.0, gamma == 2.0, kinds)
    family.launch(
        (programs, 1, 1), (logits, targets, sums, None, None, None),
        (size, classes, float(alpha), float(gamma), float(smoothing)), size, classes,
    )  # fmt: skip
    if num_positives.dtype != sums.dtype:
        num_positives = num_positives.to(sums.dtype)
    return sums.sum() / (num_positives.reshape(()) if num_positives.dim() else num_positives)


def backward(
    dy: torch.Tensor, needs: list[bool], *, logits: torch.Tensor, targets: torch.Tensor,
    num_positives: torch.Tensor, classes: int, alpha: float, gamma: float, smoothing: float,
) -> list[torch.Tensor]:  # fmt: skip
    """Compute the gradient of the logits, which are read again."""
    out, size, columns = torch.empty_like(logits), logits.numel(), logits.shape[-1]
    kinds = (logits.dtype, targets.dtype, dy.dtype, num_positives.dtype)
    family = _family(columns, smoothing != 0.0, gamma == 2.0, kinds)
    family.launch(
        (-(-size // BLOCK), 1, 1), (logits, targets, None, dy, num_positives, out),
        (size, classes, float(alpha), float(gamma), float(smoothing)), size, classes,
    )  # fmt: skip
    return [out]
