"""Group norm of images whose channels are last in memory; see :mod:`apex.ops.group_norm`.

A group is a run of a few channels, often ten: read by groups, a 16-bit image comes in pieces of 20
bytes. So nothing here walks through groups. Tiles are rows of neighbouring channels, read in 128
bits whatever the groups are, and summed for each channel; a small kernel joins the channels of a
group. Forward reads the image twice and writes it once, backward reads two images twice and writes
one; an image that fits the cache is read from there the second time.

Sums are taken of the difference to the image's first pixel, so that a mean that is large against
the spread does not cancel away the variance. Every sum has one order: results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._cases import Case

# Elements of a tile: 16 for each of 128 threads, two 128-bit loads of 16-bit images; with two
# images and two sums that is some 100 registers. Derived, not tuned on a GPU.
TILE = 2048
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
# Programs that fill a chip: eight for each of an H100's 132 multiprocessors, or nearly so.
PROGRAMS = 1024
# Joining partial sums, one program a group: elements at a time, and dependent steps at most.
JOINED, STEPS = 2048, 64


@triton.jit
def _place(parts, rows, step, CHANNELS: tl.constexpr):
    """Image, first and last row, and channels of a program."""
    image = (tl.program_id(0) // parts).to(tl.int64)
    first = (tl.program_id(0) % parts) * step
    last = tl.minimum(first + step, rows)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return image, first, last, channel


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
def _group(channels, groups, WIDTH: tl.constexpr):
    """Image and channels of the group of a program."""
    image = (tl.program_id(0) // groups).to(tl.int64)
    width = channels // groups
    lane = tl.arange(0, WIDTH)
    return image, tl.program_id(0) % groups * width + lane, lane < width, width


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
def _joined(
    partial_ptr, image, channel, inside, channels, parts,
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Both sums of a group's channels, over all programs of the image."""
    one = tl.zeros((PARTS, WIDTH), tl.float32)
    two = tl.zeros((PARTS, WIDTH), tl.float32)
    for at in range(0, parts, PARTS):
        part = at + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        start = (image * parts + part) * 2 * channels
        pointers = partial_ptr + start[:, None] + channel[None, :]
        one += tl.load(pointers, mask=mask, other=0.0)
        two += tl.load(pointers + channels, mask=mask, other=0.0)
    return tl.sum(one, axis=0), tl.sum(two, axis=0)


@triton.jit
def group_norm_sums(
    # data
    x_ptr, origin_ptr, partial_ptr,
    # shape
    rows, channels, parts, step,
    # compile-time
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sums over rows of ``x - x[first pixel]`` and of its square, for each channel."""
    image, first, last, channel = _place(parts, rows, step, CHANNELS)
    origin = origin_ptr + image * rows * channels + channel
    shift = tl.load(origin, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    one = tl.zeros((ROWS, CHANNELS), tl.float32)
    two = tl.zeros((ROWS, CHANNELS), tl.float32)
    for at in range(first, last, ROWS):
        offsets, mask = _tile(image, at, last, rows, channels, channel, ROWS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - shift, 0.0)
        one += x
        two += x * x
    _store_sums(partial_ptr, channels, channel, tl.sum(one, axis=0), tl.sum(two, axis=0))


@triton.jit
def group_norm_stats(
    # data
    origin_ptr, partial_ptr, stats_ptr,
    # shape and scalars
    rows, channels, groups, parts, eps,
    # compile-time
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Mean and reciprocal deviation of a group, from the sums of its channels."""
    image, channel, inside, width = _group(channels, groups, WIDTH)
    s, q = _joined(partial_ptr, image, channel, inside, channels, parts, PARTS, WIDTH)
    origin = origin_ptr + image * rows * channels + channel
    shift = tl.load(origin, mask=inside, other=0.0).to(tl.float32)
    means = tl.where(inside, shift + s / rows, 0.0)
    mean = tl.sum(means, axis=0) / width
    apart = tl.where(inside, means - mean, 0.0)
    spread = tl.where(inside, q - s * s / rows, 0.0) / rows
    variance = tl.sum(spread + apart * apart, axis=0) / width
    # A rounding may leave a constant group a negative variance; a nan is to stay one.
    variance = tl.where(variance < 0.0, 0.0, variance)
    _store_pair(stats_ptr, mean, 1.0 / tl.sqrt_rn(variance + eps))


@triton.jit
def group_norm_forward(
    # data
    x_ptr, weight_ptr, bias_ptr, stats_ptr, y_ptr,
    # shape
    rows, channels, groups, parts, step,
    # compile-time
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """``y = act((x - mean) * rstd * weight + bias)``."""
    image, first, last, channel = _place(parts, rows, step, CHANNELS)
    mean, rstd = _of_groups(stats_ptr, image, channel, channels, groups)
    weight = _of_channels(weight_ptr, channel, channels, 1.0)
    bias = _of_channels(bias_ptr, channel, channels, 0.0)
    for at in range(first, last, ROWS):
        offsets, mask = _tile(image, at, last, rows, channels, channel, ROWS)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean[None, :]) * rstd[None, :] * weight[None, :] + bias[None, :]
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def _slope(dy_ptr, x_ptr, offsets, mask, mean, rstd, weight, bias, SILU: tl.constexpr):
    """Normalized input, and gradient with respect to what the activation is applied to."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    dz = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x_hat = (x - mean[None, :]) * rstd[None, :]
    if SILU:
        z = x_hat * weight[None, :] + bias[None, :]
        gate = 1.0 / (1.0 + tl.exp(-z))
        dz = dz * gate * (1.0 + z * (1.0 - gate))
    return x_hat, dz


@triton.jit
def group_norm_grad_sums(
    # data
    dy_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, partial_ptr,
    # shape
    rows, channels, groups, parts, step,
    # compile-time
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sums over rows of ``dz`` and of ``dz * x_hat``, for each channel."""
    image, first, last, channel = _place(parts, rows, step, CHANNELS)
    mean, rstd = _of_groups(stats_ptr, image, channel, channels, groups)
    weight = _of_channels(weight_ptr, channel, channels, 1.0)
    bias = _of_channels(bias_ptr, channel, channels, 0.0)
    one = tl.zeros((ROWS, CHANNELS), tl.float32)
    two = tl.zeros((ROWS, CHANNELS), tl.float32)
    for at in range(first, last, ROWS):
        offsets, mask = _tile(image, at, last, rows, channels, channel, ROWS)
        x_hat, dz = _slope(dy_ptr, x_ptr, offsets, mask, mean, rstd, weight, bias, SILU)
        one += tl.where(mask, dz, 0.0)
        two += tl.where(mask, dz * x_hat, 0.0)
    _store_sums(partial_ptr, channels, channel, tl.sum(one, axis=0), tl.sum(two, axis=0))


@triton.jit
def group_norm_grad_stats(
    # data
    partial_ptr, weight_ptr, sums_ptr, means_ptr,
    # shape
    rows, channels, groups, parts,
    # compile-time
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Join partial sums: those of each channel, and the means over a group times the weight."""
    image, channel, inside, width = _group(channels, groups, WIDTH)
    a, b = _joined(partial_ptr, image, channel, inside, channels, parts, PARTS, WIDTH)
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
    # data
    dy_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, means_ptr, dx_ptr,
    # shape
    rows, channels, groups, parts, step,
    # compile-time
    SILU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """``dx = rstd * (weight * dz - mean(weight * dz) - x_hat * mean(weight * dz * x_hat))``."""
    image, first, last, channel = _place(parts, rows, step, CHANNELS)
    mean, rstd = _of_groups(stats_ptr, image, channel, channels, groups)
    level, tilt = _of_groups(means_ptr, image, channel, channels, groups)
    weight = _of_channels(weight_ptr, channel, channels, 1.0)
    bias = _of_channels(bias_ptr, channel, channels, 0.0)
    for at in range(first, last, ROWS):
        offsets, mask = _tile(image, at, last, rows, channels, channel, ROWS)
        x_hat, dz = _slope(dy_ptr, x_ptr, offsets, mask, mean, rstd, weight, bias, SILU)
        dx = rstd[None, :] * (dz * weight[None, :] - level[None, :] - x_hat * tilt[None, :])
        tl.store(dx_ptr + offsets, dx, mask=mask)


# -- launching -----------------------------------------------------------------------------------


class _Shape:
    """How an image is cut into programs."""

    def __init__(self, x: torch.Tensor, groups: int) -> None:
        self.images, self.channels = x.shape[:2]
        self.rows, self.groups = x.numel() // (self.images * self.channels), groups
        block = tile_channels(self.channels)
        height = TILE // block
        columns, blocks = triton.cdiv(self.channels, block), triton.cdiv(self.rows, height)
        width = triton.next_power_of_2(self.channels // groups)
        joined = max(1, JOINED // width)
        parts = max(1, min(PROGRAMS // max(1, self.images * columns), STEPS * joined, blocks))
        self.step = triton.cdiv(blocks, parts) * height
        self.parts = triton.cdiv(self.rows, self.step)
        self.grid = (self.images * self.parts, columns)
        self.sizes = (self.rows, self.channels, groups, self.parts)
        self.tiles: dict[str, Any] = {"ROWS": height, "CHANNELS": block, **OPTIONS}
        joined = triton.next_power_of_2(min(self.parts, joined))
        self.joins: dict[str, Any] = {"PARTS": joined, "WIDTH": width, **OPTIONS}

    def empty(self, x: torch.Tensor, *shape: int) -> torch.Tensor:
        """Room for two numbers of everything in ``shape`` for each image."""
        return x.new_empty((self.images, *shape), dtype=torch.float32)


def tile_channels(channels: int) -> int:
    """Channels of a tile: as many as leave at most an eighth of the threads without work."""
    for block in (512, 256, 128, 64, 32):
        if triton.cdiv(channels, block) * block - channels <= channels // 8:
            return block
    return 16


def allocate(
    x: torch.Tensor, weight: Any, bias: Any, groups: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y`` like ``x``, and float32 ``(images, groups, 2)``: mean and 1 / std; uninitialized."""
    return torch.empty_like(x), x.new_empty((x.shape[0], groups, 2), dtype=torch.float32)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize ``x``, not empty, whose channels are last in memory; results as `allocate` says."""
    weight, bias = _contiguous(weight), _contiguous(bias)
    shape = _Shape(x, groups)
    y, stats = allocate(x, weight, bias, groups)
    partial = shape.empty(x, shape.parts, 2, shape.channels)
    group_norm_sums[shape.grid](
        x, x, partial, shape.rows, shape.channels, shape.parts, shape.step, **shape.tiles
    )
    group_norm_stats[(shape.images * groups,)](x, partial, stats, *shape.sizes, eps, **shape.joins)
    group_norm_forward[shape.grid](
        x, weight, bias, stats, y, *shape.sizes, shape.step, silu, **shape.tiles
    )
    return y, stats


def backward(
    dy: torch.Tensor,
    needs: Sequence[bool],
    *,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    stats: torch.Tensor,
    groups: int,
    eps: float,
    silu: bool,
) -> list[torch.Tensor | None]:
    """Gradients of x, weight and bias, as far as they are needed; ``dy`` may have any strides."""
    kept, stats = (_contiguous(weight), _contiguous(bias)), stats.contiguous()
    dy = dy.movedim(1, -1).contiguous()  # in memory like x
    shape = _Shape(x, groups)
    partial = shape.empty(x, shape.parts, 2, shape.channels)
    sums, means = shape.empty(x, 2, shape.channels), shape.empty(x, groups, 2)
    group_norm_grad_sums[shape.grid](
        dy, x, *kept, stats, partial, *shape.sizes, shape.step, silu, **shape.tiles
    )
    group_norm_grad_stats[(shape.images * groups,)](
        partial, kept[0], sums, means, *shape.sizes, **shape.joins
    )
    dx = None
    if needs[0]:
        dx = torch.empty_like(x)
        group_norm_backward[shape.grid](
            dy, x, *kept, stats, means, dx, *shape.sizes, shape.step, silu, **shape.tiles
        )
    dweight = sums[:, 1].sum(0).to(weight.dtype) if weight is not None and needs[1] else None
    dbias = sums[:, 0].sum(0).to(bias.dtype) if bias is not None and needs[2] else None
    return [dx, dweight, dbias]


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


# -- what is inspected ---------------------------------------------------------------------------

_GATHER = "two numbers of a group, for each channel"
_CHANNEL = "one number a channel, once for all rows"
_SUM = "two sums a channel for all rows of a program"
_NARROW = {
    "origin_ptr": "one pixel, as the origin of sums",
    "weight_ptr": _CHANNEL, "bias_ptr": _CHANNEL,
    "stats_ptr": _GATHER, "means_ptr": _GATHER,
    "partial_ptr": _SUM, "sums_ptr": _SUM,
}  # fmt: skip
_READS, _WRITES = ("dy_ptr", "x_ptr"), ("y_ptr", "dx_ptr")


def _case(kernel: Any, words: str, kind: str, **constants: Any) -> Case:
    """A case for images of one type; every pointer of the kernel that is not None is there."""
    images = (*_READS, *_WRITES, "origin_ptr")
    signature = {}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            signature[name] = f"*{kind if name in images else 'fp32'}"
        elif not name.isupper():
            signature[name] = "fp32" if name == "eps" else "i32"
    there = [name for name in signature if name not in constants]
    return Case(
        kernel, "group_norm", f"{kernel.__name__.removeprefix('group_norm_')} {words}",
        signature=signature, constants=constants,
        reads=tuple(name for name in there if name in _READS),
        writes=tuple(name for name in there if name in _WRITES),
        narrow={name: why for name, why in _NARROW.items() if name in there},
        tile=TILE, divisible=("channels",), options=OPTIONS,
    )  # fmt: skip


def cases() -> Iterator[Case]:
    """What is inspected."""
    joins = {"PARTS": JOINED // 16, "WIDTH": 16}
    for kind in ("fp32", "fp16", "bf16"):
        for channels in (64, 512):
            tile = {"ROWS": TILE // channels, "CHANNELS": channels}
            words = f"{kind} {channels} channels"
            yield _case(group_norm_sums, words, kind, **tile)
            for kernel in (group_norm_forward, group_norm_grad_sums, group_norm_backward):
                for silu in (False, True):
                    yield _case(kernel, words + " silu" * silu, kind, SILU=silu, **tile)
        plain = {"weight_ptr": None, "bias_ptr": None, "SILU": False}
        yield _case(group_norm_forward, f"{kind} no weight", kind, **plain, **tile)
        yield _case(group_norm_stats, kind, kind, **joins)
    yield _case(group_norm_grad_stats, "fp32", "fp32", **joins)
