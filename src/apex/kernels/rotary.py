"""Rotary position embedding: a program rotates all heads of one position.

It reads the position's cos and sin once, whatever the number of heads, and each element of ``t``
once; it writes each element of the result once: 4 bytes an element in 16 bits, 8 in float32. The
usual expression in torch, ``t * cos + cat((-t2, t1)) * sin``, takes 20 and 40: the negated half 2
(a read and a write of 16 bits, of half the elements), the concatenation 4, two products 4 each, the
sum 6. cos and sin are float32, 8 bytes a channel of a position: with 8 heads 1 more an element.

The backward is the same kernel, which takes the two halves of sin crosswise and negated.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._launching import power_of_2
from apex.kernels._plans import Family
from apex.kernels._settings import kept, setting

# Elements of each half; of a warp 8 a thread, 128 bits of a 16-bit tensor. Derived, not measured.
TILE = 1024
WARP = 8 * (64 if torch.version.hip else 32)


@triton.jit
def rotary_kernel(
    t_ptr, cos_ptr, sin_ptr, positions_ptr, y_ptr,
    columns, heads, row_stride, column_stride, head_stride,
    DIM: tl.constexpr, GROUPS: tl.constexpr, BACK: tl.constexpr, ALIGNED: tl.constexpr,
    CHANNELS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Rotate one position of one sequence; strides are in units of ``ALIGNED`` elements."""
    program = tl.program_id(0).to(tl.int64)
    row, column = program // columns, program % columns
    at = column if DIM == 1 else row
    t_ptr += (row * row_stride + column * column_stride) * ALIGNED
    y_ptr += program * heads * (GROUPS * CHANNELS)
    lanes = tl.arange(0, LANES)
    for group in tl.static_range(GROUPS):
        if positions_ptr is None:
            table = at * (2 * HALF)
        else:
            table = tl.load(positions_ptr + at * GROUPS + group) * (2 * HALF)
        cos_1 = tl.load(cos_ptr + table + lanes, lanes < HALF)[None, :]
        cos_2 = tl.load(cos_ptr + table + HALF + lanes, lanes < HALF)[None, :]
        sin_1 = tl.load(sin_ptr + table + lanes, lanes < HALF)[None, :]
        sin_2 = tl.load(sin_ptr + table + HALF + lanes, lanes < HALF)[None, :]
        if BACK:  # the transpose of (cos_1, -sin_1; sin_2, cos_2)
            sin_1, sin_2 = -sin_2, -sin_1
        for start in range(0, heads, HEADS):
            head = (start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
            t_head = t_ptr + head * head_stride * ALIGNED + group * CHANNELS
            y_head = y_ptr + head * (GROUPS * CHANNELS) + group * CHANNELS
            mask = (head < heads) & (lanes < HALF)[None, :]
            first = tl.load(t_head + lanes[None, :], mask).to(tl.float32)
            second = tl.load(t_head + HALF + lanes[None, :], mask).to(tl.float32)
            y_1 = first * cos_1 - second * sin_1
            y_2 = second * cos_2 + first * sin_2
            tl.store(y_head + lanes[None, :], y_1.to(y_ptr.dtype.element_ty), mask)
            tl.store(y_head + HALF + lanes[None, :], y_2.to(y_ptr.dtype.element_ty), mask)
            if REST:
                rest = 2 * HALF + tl.arange(0, REST)[None, :]
                mask = (head < heads) & (rest < CHANNELS)
                tl.store(y_head + rest, tl.load(t_head + rest, mask), mask)


def forward(
    t: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: Any,
    dim: int,
    back: Any = False,
) -> torch.Tensor:
    """Rotate ``t``, of any strides, or the gradient ``t`` back."""
    y = torch.empty_like(t, memory_format=torch.contiguous_format)
    t = t if t.stride(3) == 1 else t.contiguous()
    rows, columns, heads, channels = t.shape
    row, column, head, _ = t.stride()
    aligned = 16 // t.element_size()
    if row % aligned or column % aligned or head % aligned:
        aligned = 1
    groups = 1
    if positions is not None:
        groups, positions = positions.shape[1], positions.contiguous()
    kinds = (t.dtype, cos.dtype, sin.dtype, None if positions is None else positions.dtype)
    family = _family(
        kinds, dim, groups, bool(back), aligned, channels // groups, cos.shape[1] // 2, heads
    )
    tensors = (t, cos.contiguous(), sin.contiguous(), positions, y)
    strides = (row // aligned, column // aligned, head // aligned)
    family.launch((rows * columns, 1, 1), tensors, (columns, heads, *strides), columns, *strides)
    return y


def backward(dy: torch.Tensor, needs: list[bool], *, dim: int, **tables: Any) -> list[torch.Tensor]:
    """Compute the gradient of ``t``, contiguous; ``dy`` may have any strides."""
    return [forward(dy, **tables, dim=dim, back=True)]


@kept
def _family(
    kinds: Any, dim: int, groups: int, back: bool, aligned: int, channels: int, half: int,
    heads: int,
) -> Family:  # fmt: skip
    *tiles, warps = _tiles(channels, half, heads, kinds[0])
    return Family(rotary_kernel, (dim, groups, back, aligned, *tiles), warps, fuse=False)


def _tiles(
    channels: int, half: int, heads: int, dtype: torch.dtype
) -> tuple[int, int, int, int, int, int]:
    """How a program is cut, by the channels of a group and half of those that are rotated."""
    lanes, rest = power_of_2(half), channels - 2 * half
    rest = power_of_2(rest) if rest else 0
    width = max(lanes, rest // 2)
    elements = width * min(power_of_2(heads), max(1, TILE // width))
    elements, warps = setting(
        "rotary", dtype, (heads, channels, half), elements=elements,
        warps=min(16, max(1, elements // WARP)),
    )  # fmt: skip
    return channels, half, max(1, elements // width), lanes, rest, warps
