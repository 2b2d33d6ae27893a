"""Cross-entropy of rows of logits on a GPU; definition: :mod:`apex.ops.losses.cross_entropy`.

Forward is one read of the logits, whatever their number: the largest logit and the sum of
exponentials so far are kept, and the sum is rescaled when a larger logit comes (Milakov and
Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867). Where rows are fewer
than multiprocessors several programs share a row. A second, small kernel joins them in a fixed
order and computes the losses. Backward is one read and one write.

The first kernel leaves out the label's logit, which the second adds. So the sum of the other
probabilities is known; near probability 1 a difference would not give it.

Rows whose label is ``padding_idx`` are not read. A label outside the row is never used as an
address: such a row's loss and gradients are nan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._launching import cdiv, half, multiprocessors, power_of_2
from apex.kernels._plans import Family
from apex.kernels._settings import kept, setting

# Elements per step: two 128-bit loads of 16-bit logits for each of 256 threads, and few enough
# values in registers (16 a thread) that eight programs fit a multiprocessor; half of those are
# enough to read at full speed. Derived, not tuned on a GPU.
BLOCK, WARPS, PROGRAMS_PER_MULTIPROCESSOR = 4096, 8, 4
# Neighbours of a row that one thread reads: their largest logit and sum of exponentials need no
# other thread, and so no barrier for each block.
LANE = 8


@triton.jit
def _label(logits_ptr, labels_ptr, row, columns):
    """The label, its logit, and a finite number near the logits: means are taken relative to it."""
    label = tl.load(labels_ptr + row).to(tl.int64)
    inside = (label >= 0) & (label < columns)
    chosen = tl.load(logits_ptr + label, mask=inside, other=float("nan")).to(tl.float32)
    return label, chosen, tl.where(tl.abs(chosen) < float("inf"), chosen, 0.0)


@triton.jit
def _exp(x):
    """``exp(x)`` in 2 instructions on sm_90; ``tl.exp`` has 5. Below 2**-126 it is 0."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _finite(largest):
    """What to subtract from logits: where all are -inf, exponentials are 0 and not nan."""
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit
def cross_entropy_sums(
    logits_ptr,
    same_logits_ptr,  # for the label's: a pointer of its own, so that widths of rows are checked
    labels_ptr, largest_ptr, total_ptr, centered_ptr,
    twice_stride, twice_columns, width, padding_idx,
    SMOOTH: tl.constexpr, BLOCK: tl.constexpr, LANE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Of ``width`` columns: largest logit and sum of exponentials but for the label, sum of logits.

    With ``AHEAD`` a block is read while the one before it is computed. ptxas leaves a thread one
    128-bit load on its way without it. Odd rows, with 16 narrow ones, have enough; they would take
    13 % more instructions.
    """
    row_stride, columns = half(twice_stride), half(twice_columns)
    row = tl.program_id(0).to(tl.int64)  # int64: row * row_stride passes 2**31
    lanes = tl.arange(0, BLOCK)
    label, _, base = _label(same_logits_ptr + row * row_stride, labels_ptr, row, columns)
    if label != padding_idx:
        logits_ptr += row * row_stride
        largest = tl.full((BLOCK // LANE,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK // LANE,), tl.float32)
        centered = tl.zeros((BLOCK // LANE,), tl.float32)
        start = tl.program_id(1) * width
        end = tl.minimum(start + width, columns)
        if AHEAD:
            following = tl.load(logits_ptr + start + lanes, start + lanes < end, -float("inf"))
        for at in range(start, end, BLOCK):
            if AHEAD:
                raw = following
                ahead = at + BLOCK + lanes
                following = tl.load(logits_ptr + ahead, ahead < end, -float("inf"))
            else:
                raw = tl.load(logits_ptr + at + lanes, at + lanes < end, -float("inf"))
            if SMOOTH:
                parts = tl.where(at + lanes < end, raw.to(tl.float32) - base, 0.0)
                centered += tl.sum(tl.reshape(parts, (BLOCK // LANE, LANE)), axis=1)
            if (label >= at) & (label < at + BLOCK):  # a branch: 1.7 instructions a byte less
                nothing = tl.full((1,), -float("inf"), tl.float32).to(raw.dtype)
                raw = tl.where(lanes == (label - at).to(tl.int32), nothing, raw)
            x = tl.reshape(raw.to(tl.float32), (BLOCK // LANE, LANE))
            grown = tl.maximum(largest, tl.max(x, axis=1))
            above = _finite(grown)
            total = total * _exp(largest - above) + tl.sum(_exp(x - above[:, None]), axis=1)
            largest = grown
        part = row * tl.num_programs(1) + tl.program_id(1)
        grown = tl.max(largest, axis=0)
        tl.store(largest_ptr + part, grown)
        tl.store(total_ptr + part, tl.sum(total * _exp(largest - _finite(grown)), axis=0))
        if SMOOTH:
            tl.store(centered_ptr + part, tl.sum(centered, axis=0))


@triton.jit
def cross_entropy_losses(
    same_logits_ptr, labels_ptr, largest_ptr, total_ptr, centered_ptr, losses_ptr, sums_ptr,
    twice_stride, twice_columns, n_parts, smoothing, padding_idx,
    SMOOTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Join the sums of a row's parts."""
    row_stride, columns = half(twice_stride), half(twice_columns)
    row = tl.program_id(0).to(tl.int64)
    label, chosen, base = _label(same_logits_ptr + row * row_stride, labels_ptr, row, columns)
    loss = 0.0
    lse = 0.0
    miss = 0.0
    if label != padding_idx:
        parts = row * n_parts + tl.arange(0, PARTS)
        mask = tl.arange(0, PARTS) < n_parts
        each = tl.load(largest_ptr + parts, mask=mask, other=-float("inf"))
        largest = tl.maximum(tl.max(each, axis=0), chosen)
        totals = tl.load(total_ptr + parts, mask=mask, other=0.0) * _exp(each - _finite(largest))
        others = tl.sum(totals, axis=0)
        total = others + _exp(chosen - _finite(largest))
        above = tl.log(total)  # what lse rounds away where logits are large
        miss = others / total
        loss = largest - chosen + above
        lse = largest + above
        if SMOOTH:
            centered = tl.load(centered_ptr + parts, mask=mask, other=0.0)
            mean = tl.sum(centered, axis=0) / columns
            loss = (1.0 - smoothing) * loss + smoothing * (largest - base - mean + above)
    tl.store(losses_ptr + row, loss)
    tl.store(sums_ptr + 2 * row, lse)
    tl.store(sums_ptr + 2 * row + 1, miss)


@triton.jit
def cross_entropy_backward(
    dy_ptr, logits_ptr, sums_ptr, labels_ptr, out_ptr,
    dy_stride, twice_stride, twice_out_stride, twice_columns, smoothing, padding_idx,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row of the gradient."""
    row_stride, out_stride = half(twice_stride), half(twice_out_stride)
    columns = half(twice_columns)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    lanes = tl.arange(0, BLOCK)
    at = start + lanes
    mask = at < columns
    label = tl.load(labels_ptr + row).to(tl.int64)
    out_ptr += row * out_stride
    if label == padding_idx:
        tl.store(out_ptr + at, tl.zeros((BLOCK,), tl.float32), mask=mask)
    else:
        dy = tl.load(dy_ptr + row * dy_stride).to(tl.float32)
        lse = tl.load(sums_ptr + 2 * row).to(tl.float32)
        miss = tl.load(sums_ptr + 2 * row + 1).to(tl.float32)
        x = tl.load(logits_ptr + row * row_stride + at, mask=mask).to(tl.float32)
        dy = tl.where((label >= 0) & (label < columns), dy, float("nan"))
        rest = smoothing / columns
        # In 32 bits: a label that is cut off lies outside of the row, whose gradient is nan.
        at_label = lanes == (label - start).to(tl.int32)
        slope = tl.where(at_label, smoothing - rest - miss, _exp(x - lse) - rest)
        tl.store(out_ptr + at, dy * slope, mask=mask)


# -- launching -----------------------------------------------------------------------------------


def _width(
    rows: int, columns: int, multiprocessors: int, block: int, programs: int, share: bool = True
) -> int:
    """Columns of a row that one program takes: all, unless multiprocessors would be idle."""
    unit = max(BLOCK, block)
    blocks = cdiv(columns, unit)
    if share and rows < multiprocessors:
        blocks = cdiv(blocks * rows, programs * multiprocessors)
    return blocks * unit


def _parts(
    rows: int, columns: int, multiprocessors: int, dtype: torch.dtype, share: bool
) -> tuple[int, tuple[int, int], int, int]:
    """Columns of a program; those of a step, and warps; programs of a row, and a power of 2."""
    block, warps, programs = setting(
        "cross_entropy_forward", dtype, (columns,), elements=_block(columns), warps=WARPS,
        programs=PROGRAMS_PER_MULTIPROCESSOR,
    )  # fmt: skip
    width = _width(rows, columns, multiprocessors, block, programs, share)
    parts = cdiv(columns, width)
    return width, (block, warps), parts, power_of_2(parts)


_parts_of = kept(_parts, 256)  # rows vary from batch to batch


# Launches without fusion: products and sums are rounded as PyTorch's.
@kept
def _of_sums(
    dtype: Any, labels: Any, padding_idx: int, smooth: bool, block: int, warps: int, ahead: bool
) -> Family:
    return Family(cross_entropy_sums, (smooth, block, LANE, ahead), warps, fuse=False)


@kept
def _of_losses(dtype: Any, labels: Any, padding_idx: int, smooth: bool, height: int) -> Family:
    return Family(cross_entropy_losses, (smooth, height), 1, fuse=False)


@kept
def _of_backward(
    columns: int, dtype: Any, dy: Any, sums: Any, labels: Any, out: Any, padding_idx: int
) -> tuple[int, Family]:
    block, warps = setting(
        "cross_entropy_backward", dtype, (columns,), elements=_block(columns), warps=WARPS
    )
    return block, Family(cross_entropy_backward, (block,), warps, fuse=False)


def _block(columns: int) -> int:
    return min(BLOCK, max(256, power_of_2(columns)))


def forward(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int,
    *, share_rows: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Losses and ``sums`` of logits, which are copied unless the columns of a row are contiguous.

    Several programs may share a row, if they are few and ``share_rows``; then its sums are added up
    in another order.
    """
    (rows, columns), smooth = logits.shape, smoothing != 0.0
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    labels = labels.contiguous()
    losses = logits.new_empty(rows, dtype=torch.float32)
    sums = losses.new_empty((rows, 2))
    processors = multiprocessors(logits.device)
    width, step, n_parts, height = _parts_of(rows, columns, processors, logits.dtype, share_rows)
    parts = (losses.new_empty(rows * n_parts), losses.new_empty(rows * n_parts))
    centered = losses.new_empty(rows * n_parts) if smooth else parts[0]  # else it is not written
    lengths = 2 * logits.stride(0), 2 * columns
    kinds = (logits.dtype, labels.dtype, padding_idx, smooth)
    _of_sums(*kinds, *step, columns % LANE == 0).launch(
        (rows, n_parts, 1), (logits, logits, labels, *parts, centered),
        (*lengths, width, padding_idx), *lengths, width,
    )  # fmt: skip
    _of_losses(*kinds, height).launch(
        (rows, 1, 1), (logits, labels, *parts, centered, losses, sums),
        (*lengths, n_parts, float(smoothing), padding_idx), *lengths, n_parts,
    )  # fmt: skip
    return losses, sums


def backward(
    dy: torch.Tensor,
    needs: Sequence[bool],
    *,
    logits: torch.Tensor,
    labels: torch.Tensor,
    sums: torch.Tensor,
    smoothing: float,
    padding_idx: int,
    out: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The gradient of the logits, written into ``out`` if given, which may be ``logits``."""
    rows, columns = logits.shape
    out = written = torch.empty_like(logits) if out is None else out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if written.stride(1) != 1:
        written = written.contiguous()
    lengths = dy.stride(0), 2 * logits.stride(0), 2 * written.stride(0), 2 * columns
    kinds = (logits.dtype, dy.dtype, sums.dtype, labels.dtype, written.dtype, padding_idx)
    block, family = _of_backward(columns, *kinds)
    family.launch(
        (rows, -(-columns // block), 1),
        (dy, logits, sums.contiguous(), labels.contiguous(), written),
        (*lengths, float(smoothing), padding_idx), *lengths,
    )  # fmt: skip
    return [out if written is out else out.copy_(written)]
