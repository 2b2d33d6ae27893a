"""Group norm of images whose channels are last in memory; see :mod:`apex.ops.norms.group_norm`.

A group is a run of a few channels, often ten: read by groups, a 16-bit image comes in pieces of 20
bytes. So nothing here walks through groups. Tiles are rows of neighbouring channels, read in 128
bits whatever the groups are, and reduced for each channel; a small kernel joins the channels of a
group. Forward reads the image twice and writes it once, backward reads two images twice and writes
one; an image that fits the cache is read from there the second time.

The forward keeps means and sums of squared differences from them, and merges those: neither a mean
that is large against the spread nor an outlier cancels away the variance. Every sum has one order:
results repeat bit for bit.

Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979, eq. 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._launching import cdiv, half, power_of_2
from apex.kernels._plans import Family
from apex.kernels._settings import kept, setting

# Elements of a tile: 16 for each of 128 threads, two 128-bit loads of 16-bit images; with two
# images and two sums that is some 100 registers. Derived, not tuned on a GPU.
TILE = 2048
WARPS = 4
# Programs that fill a chip: eight for each of an H100's 132 multiprocessors, or nearly so.
PROGRAMS = 1024
# Joining partial sums, one program a group: elements at a time, and dependent steps at most.
JOINED, STEPS = 2048, 64


@triton.jit
def _place(parts, rows, step, twice_channels, CHANNELS: tl.constexpr):
    """Image, first and last row, how many channels there are, and those of a program."""
    image = (tl.program_id(0) // parts).to(tl.int64)
    first = (tl.program_id(0) % parts) * step
    last = tl.minimum(first + step, rows)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return image, first, last, half(twice_channels), channel


@triton.jit
def _tile(image, at, last, rows, channels, channel, ROWS: tl.constexpr):
    """Offsets and mask of the tile of ``ROWS`` rows from ``at`` on."""
    row = at + tl.arange(0, ROWS)
    start = (image * rows + row.to(tl.int64)) * channels
    mask = (row < last)[:, None] & (channel < channels)[None, :]
    return start[:, None] + channel[None, :], mask


@triton.jit
def _of_channels(pointer, channel, channels, default):
    """Weights or biases of a tile's channels, or the default if there are none."""
    values = tl.full(channel.shape, default, tl.float32)
    if pointer is not None:
        values = tl.load(pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
    return values


@triton.jit
def _of_groups(stats_ptr, image, channel, channels, groups):
    """The two numbers that each channel's group has."""
    width = channels // groups
    inside = channel < channels
    at = (image * groups + channel // width) * 2
    first = tl.load(stats_ptr + at, mask=inside, other=0.0)
    second = tl.load(stats_ptr + at + 1, mask=inside, other=0.0)
    return first, second


@triton.jit
def _group(twice_channels, groups, WIDTH: tl.constexpr):
    """Image, how many channels there are, and those of the group of a program."""
    image, channels = (tl.program_id(0) // groups).to(tl.int64), half(twice_channels)
    width = channels // groups
    lane = tl.arange(0, WIDTH)
    return image, channels, tl.program_id(0) % groups * width + lane, lane < width, width


@triton.jit
def _store_pair(pointer, one, two):
    """Write a group's two numbers."""
    at = pointer + tl.program_id(0).to(tl.int64) * 2
    tl.store(at, one)
    tl.store(at + 1, two)


@triton.jit
def _store_sums(partial_ptr, channels, channel, one, two):
    """Write a program's sums as two rows of ``partial``."""
    at = partial_ptr + tl.program_id(0).to(tl.int64) * 2 * channels + channel
    tl.store(at, one, mask=channel < channels)
    tl.store(at + channels, two, mask=channel < channels)


@triton.jit
def _pair(partial_ptr, at, image, channel, inside, channels, parts, PARTS: tl.constexpr):
    """Numbers of programs of an image, from ``at`` on, and both rows that each has stored."""
    part = at + tl.arange(0, PARTS)
    mask = (part < parts)[:, None] & inside[None, :]
    start = (image * parts + part) * 2 * channels
    pointers = partial_ptr + start[:, None] + channel[None, :]
    one = tl.load(pointers, mask=mask, other=0.0)
    return part, one, tl.load(pointers + channels, mask=mask, other=0.0)


@triton.jit
def _merged(means, squares, counts, count):
    """Mean and sum of squared differences from it, of ``count`` numbers, merged along axis 0."""
    mean = tl.sum(means * counts, axis=0) / count
    apart = means - mean
    # The sum above has roundings of a large mean, this one has not.
    more = tl.sum(apart * counts, axis=0) / count
    return mean + more, tl.sum(squares + counts * (apart * apart), axis=0)


@triton.jit
def group_norm_moments(
    x_ptr, partial_ptr,
    rows, twice_channels, parts, step,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean over a program's rows, and sum of squared differences from it, for each channel.

    Each lane keeps both of what it has seen (Welford); lanes are merged at the end (Chan et al.).
    9 instructions an element on sm_90, 4.6 a byte of a 16-bit image; by separate roundings 11.
    """
    image, first, last, channels, channel = _place(parts, rows, step, twice_channels, CHANNELS)
    means = tl.zeros((ROWS, CHANNELS), tl.float32)
    squares = tl.zeros((ROWS, CHANNELS), tl.float32)
    seen = 0.0
    for at in tl.range(first, last, ROWS, num_stages=STAGES):
        offsets, mask = _tile(image, at, last, rows, channels, channel, ROWS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        seen += 1.0
        share = 1.0 / seen
        delta = tl.where(mask, x - means, 0.0)
        means = tl.fma(delta, share, means)
        squares = tl.fma(delta * delta, 1.0 - share, squares)
    counts = tl.cdiv(tl.maximum(last - first - tl.arange(0, ROWS), 0), ROWS).to(tl.float32)[:, None]
    mean, squared = _merged(means, squares, counts, last - first)
    _store_sums(partial_ptr, channels, channel, mean, squared)


@triton.jit
def group_norm_stats(
    partial_ptr, stats_ptr,
    rows, twice_channels, groups, parts, step, eps,
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Mean and reciprocal deviation of a group, merged from those of programs and channels."""
    image, channels, channel, inside, width = _group(twice_channels, groups, WIDTH)
    means = tl.zeros((PARTS, WIDTH), tl.float32)
    squares = tl.zeros((PARTS, WIDTH), tl.float32)
    seen = tl.zeros((PARTS, 1), tl.float32)
    for at in range(0, parts, PARTS):
        part, mean, squared = _pair(partial_ptr, at, image, channel, inside, channels, parts, PARTS)
        count = tl.minimum(tl.maximum(rows - part * step, 0), step).to(tl.float32)[:, None]
        total = seen + count
        share = count / tl.maximum(total, 1.0)
        delta = mean - means
        means += delta * share
        squares += squared + delta * (delta * (seen * share))
        seen = total
    mean, squared = _merged(means, squares, seen, rows)  # of each channel
    seen = tl.where(inside, 1.0, 0.0) * rows
    mean, squared = _merged(mean, squared, seen, rows * 1.0 * width)
    variance = squared / (rows * 1.0 * width)
    _store_pair(stats_ptr, mean, 1.0 / tl.sqrt_rn(variance + eps))


@triton.jit
def _sigmoid(x):
    """4 instructions on sm_90, and `tl.exp` and a division 14; `exp2` and `rsqrt` are one each."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def group_norm_forward(
    x_ptr, weight_ptr, bias_ptr, stats_ptr, y_ptr,
    rows, twice_channels, groups, parts, step,
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``y = act((x - mean) * rstd * weight + bias)``."""
    image, first, last, channels, channel = _place(parts, rows, step, twice_channels, CHANNELS)
    mean, rstd = _of_groups(stats_ptr, image, channel, channels, groups)
    factor = rstd * _of_channels(weight_ptr, channel, channels, 1.0)
    bias = _of_channels(bias_ptr, channel, channels, 0.0)
    for at in tl.range(first, last, ROWS, num_stages=STAGES):
        offsets, mask = _tile(image, at, last, rows, channels, channel, ROWS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean[None, :]) * factor[None, :] + bias[None, :]
        if SILU:
            y = y * _sigmoid(y)
        tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def _slope(dy_ptr, x_ptr, offsets, mask, mean, rstd, weight, bias, SILU: tl.constexpr):
    """Normalized input, and gradient with respect to what the activation is applied to."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    dz = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x_hat = (x - mean[None, :]) * rstd[None, :]
    if SILU:
        z = x_hat * weight[None, :] + bias[None, :]
        gate = _sigmoid(z)
        dz = dz * gate * (1.0 + z * (1.0 - gate))
    return x_hat, dz


@triton.jit
def group_norm_grad_sums(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, partial_ptr,
    rows, twice_channels, groups, parts, step,
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over rows of ``dz`` and of ``dz * x_hat``, for each channel."""
    image, first, last, channels, channel = _place(parts, rows, step, twice_channels, CHANNELS)
    mean, rstd = _of_groups(stats_ptr, image, channel, channels, groups)
    weight = _of_channels(weight_ptr, channel, channels, 1.0)
    bias = _of_channels(bias_ptr, channel, channels, 0.0)
    one = tl.zeros((ROWS, CHANNELS), tl.float32)
    two = tl.zeros((ROWS, CHANNELS), tl.float32)
    for at in tl.range(first, last, ROWS, num_stages=STAGES):
        offsets, mask = _tile(image, at, last, rows, channels, channel, ROWS)
        x_hat, dz = _slope(dy_ptr, x_ptr, offsets, mask, mean, rstd, weight, bias, SILU)
        one += dz  # 0 outside of the mask, as dy is
        two += dz * x_hat
    _store_sums(partial_ptr, channels, channel, tl.sum(one, axis=0), tl.sum(two, axis=0))


@triton.jit
def group_norm_grad_stats(
    partial_ptr, weight_ptr, sums_ptr, means_ptr,
    rows, twice_channels, groups, parts,
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Join partial sums: those of each channel, and the means over a group times the weight."""
    image, channels, channel, inside, width = _group(twice_channels, groups, WIDTH)
    one = tl.zeros((PARTS, WIDTH), tl.float32)
    two = tl.zeros((PARTS, WIDTH), tl.float32)
    for at in range(0, parts, PARTS):
        _, a, b = _pair(partial_ptr, at, image, channel, inside, channels, parts, PARTS)
        one += a
        two += b
    a, b = tl.sum(one, axis=0), tl.sum(two, axis=0)
    out = sums_ptr + image * 2 * channels + channel
    tl.store(out, a, mask=inside)
    tl.store(out + channels, b, mask=inside)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        a *= weight
        b *= weight
    count = rows * 1.0 * width
    _store_pair(means_ptr, tl.sum(a, axis=0) / count, tl.sum(b, axis=0) / count)


@triton.jit
def group_norm_backward(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, means_ptr, dx_ptr,
    rows, twice_channels, groups, parts, step,
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``dx = rstd * (weight * dz - mean(weight * dz) - x_hat * mean(weight * dz * x_hat))``."""
    image, first, last, channels, channel = _place(parts, rows, step, twice_channels, CHANNELS)
    mean, rstd = _of_groups(stats_ptr, image, channel, channels, groups)
    level, tilt = _of_groups(means_ptr, image, channel, channels, groups)
    weight = _of_channels(weight_ptr, channel, channels, 1.0)
    bias = _of_channels(bias_ptr, channel, channels, 0.0)
    factor, level, tilt = rstd * weight, rstd * level, rstd * tilt
    for at in tl.range(first, last, ROWS, num_stages=STAGES):
        offsets, mask = _tile(image, at, last, rows, channels, channel, ROWS)
        x_hat, dz = _slope(dy_ptr, x_ptr, offsets, mask, mean, rstd, weight, bias, SILU)
        dx = dz * factor[None, :] - (x_hat * tilt[None, :] + level[None, :])
        tl.store(dx_ptr + offsets, dx, mask=mask)


# -- launching -----------------------------------------------------------------------------------


class _Shape:
    """How images are cut into programs; ``rows`` are the pixels of one."""

    def __init__(
        self, of: str, dtype: torch.dtype, images: int, channels: int, rows: int, groups: int
    ) -> None:
        self.images = images
        block, elements, self.warps, stages, programs = setting(
            f"group_norm_{of}", dtype, (channels, groups, rows), width=tile_channels(channels),
            elements=TILE, warps=WARPS, stages=0, programs=PROGRAMS,
        )  # fmt: skip
        height = elements // block
        columns, blocks = cdiv(channels, block), cdiv(rows, height)
        width = power_of_2(channels // groups)
        joined = max(1, JOINED // width)
        parts = max(1, min(programs // max(1, self.images * columns), STEPS * joined, blocks))
        self.step = cdiv(blocks, parts) * height
        self.parts = cdiv(rows, self.step)
        self.grid = (images * self.parts, columns, 1)
        self.per_group = (images * groups, 1, 1)
        self.sizes = (rows, 2 * channels, groups, self.parts)
        self.tile = (height, block, stages or None)
        self.joins = (power_of_2(min(self.parts, joined)), width)


@kept
def _of_forward(kinds: Any, silu: bool, tile: Any, joins: Any, warps: int) -> tuple[Family, ...]:
    """For images and weights of some dtypes: moments, statistics, result."""
    return (
        Family(group_norm_moments, tile, warps),
        Family(group_norm_stats, joins, WARPS),
        Family(group_norm_forward, (silu, *tile), warps),
    )


@kept
def _of_backward(kinds: Any, silu: bool, tile: Any, joins: Any, warps: int) -> tuple[Family, ...]:
    """For images and weights of some dtypes: sums, their statistics, gradient of the input."""
    return (
        Family(group_norm_grad_sums, (silu, *tile), warps),
        Family(group_norm_grad_stats, joins, WARPS),
        Family(group_norm_backward, (silu, *tile), warps),
    )


_shapes = kept(_Shape, 256)  # sizes of images vary


def tile_channels(channels: int) -> int:
    """Channels of a tile: as many as leave at most an eighth of the threads without work."""
    for block in (512, 256, 128, 64, 32):
        if cdiv(channels, block) * block - channels <= channels // 8:
            return block
    return 16


def forward(
    x: torch.Tensor, weight: Any, bias: Any, groups: int, eps: float, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize ``x``, not empty, whose channels are last in memory.

    Returns:
        ``y`` like ``x``, and float32 ``(images, groups, 2)``: mean and 1 / std.
    """
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    images, channels, *_ = x.shape
    pixels = x.numel() // (images * channels)
    shape = _shapes("forward", x.dtype, images, channels, pixels, groups)
    y, stats = torch.empty_like(x), x.new_empty(images, groups, 2, dtype=torch.float32)
    rows, twice_channels, _, parts = shape.sizes
    partial = stats.new_empty(images * parts * 2 * channels)
    grid, sizes, step, tile = shape.grid, shape.sizes, shape.step, shape.tile
    weight_dtype = None if weight is None else weight.dtype
    bias_dtype = None if bias is None else bias.dtype
    kinds = (x.dtype, weight_dtype, bias_dtype)  # named: a comprehension has a frame
    first, second, third = _of_forward(kinds, silu, tile, shape.joins, shape.warps)
    first.launch(grid, (x, partial), (rows, twice_channels, parts, step), *sizes, step)
    numbers = (*sizes, step)
    second.launch(shape.per_group, (partial, stats), (*numbers, float(eps)), *numbers)
    third.launch(grid, (x, weight, bias, stats, y), numbers, *numbers)
    return y, stats


def backward(
    dy: torch.Tensor, needs: Sequence[bool], *, x: torch.Tensor, weight: Any, bias: Any,
    stats: torch.Tensor, groups: int, eps: float, silu: bool,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Gradients of x, weight and bias, as far as they are needed; ``dy`` may have any strides."""
    stats = stats.contiguous()
    weights = (
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
    )
    if dy.stride() != x.stride():
        dy = dy.movedim(1, -1).contiguous()  # in memory like x
    images, channels, *_ = x.shape
    pixels = x.numel() // (images * channels)
    shape = _shapes("backward", x.dtype, images, channels, pixels, groups)
    partial = x.new_empty(images * shape.parts * 2 * channels, dtype=torch.float32)
    sums = partial.new_empty(images, 2, channels)
    means = partial.new_empty(images * groups * 2)
    tensors = (dy, x, *weights, stats)
    weight_dtype = None if weight is None else weight.dtype
    bias_dtype = None if bias is None else bias.dtype
    kinds = (dy.dtype, x.dtype, weight_dtype, bias_dtype, stats.dtype)
    first, second, third = _of_backward(kinds, silu, shape.tile, shape.joins, shape.warps)
    grid, sizes, numbers = shape.grid, shape.sizes, (*shape.sizes, shape.step)
    first.launch(grid, (*tensors, partial), numbers, *numbers)
    second.launch(shape.per_group, (partial, weights[0], sums, means), sizes, *sizes)
    grads: list[torch.Tensor | None] = [None] * 3
    if needs[0]:
        grads[0] = torch.empty_like(x)
        third.launch(grid, (*tensors, means, grads[0]), numbers, *numbers)
    of_images = sums.sum(0) if any(needs[1:]) else None
    for place, (of, row) in enumerate(((weight, 1), (bias, 0)), 1):
        if of_images is not None and of is not None and needs[place]:
            # A copy: results of an operator may not share memory.
            grads[place] = of_images[row].to(of.dtype, copy=True)
    return grads
