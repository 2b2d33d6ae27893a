"""Group normalization of channels-last images; see :mod:`apex.ops.group_norm` for the definition.

A group is a run of a few channels, often ten: read by groups, a 16-bit image comes in pieces of 20
bytes. So nothing here walks through groups. Tiles are rows of neighbouring channels, read in 128
bits whatever the groups are, and summed for each channel; a small kernel joins the channels of a
group. Forward reads the image twice and writes it once, backward reads two images twice and writes
one; an image that fits the cache is read from there the second time.

Sums are taken of the difference to the image's first pixel, so that a mean that is large against
the spread does not cancel away the variance. Every sum has one order: results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._cases import Case

# Elements of a tile: 16 for each of 128 threads, two 128-bit loads of 16-bit images; with two
# images and two sums that is some 100 registers. Derived, not tuned on a GPU.
TILE = 2048
WARPS = 4
# Programs that fill a chip: eight for each of an H100's 132 multiprocessors, or nearly so.
PROGRAMS = 1024
# Partial sums of a group that are joined at a time.
JOINED = 1024


@triton.jit
def _place(parts, rows, step, CHANNELS: tl.constexpr):
    """Image, first and last row, and channels of a program."""
    image = (tl.program_id(0) // parts).to(tl.int64)
    first = (tl.program_id(0) % parts) * step
    last = tl.minimum(first + step, rows)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return image, first, last, channel


@triton.jit
def _tile(pointer, image, at, last, rows, channels, channel, ROWS: tl.constexpr):
    """Addresses and mask of the tile of ``ROWS`` rows from ``at`` on."""
    row = at + tl.arange(0, ROWS)
    start = (image * rows + row.to(tl.int64)) * channels
    mask = (row < last)[:, None] & (channel < channels)[None, :]
    return pointer + start[:, None] + channel[None, :], mask


@triton.jit
def _of_channels(pointer, channel, channels, default, EXISTS: tl.constexpr):
    """Weights or biases of a tile's channels."""
    if EXISTS:
        return tl.load(pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
    return tl.full(channel.shape, default, tl.float32)


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
def _store_sums(partial_ptr, parts, channels, channel, one, two):
    """Write a program's sums as two rows of ``partial``."""
    at = partial_ptr + tl.program_id(0).to(tl.int64) * 2 * channels + channel
    tl.store(at, one, mask=channel < channels)
    tl.store(at + channels, two, mask=channel < channels)


@triton.jit
def group_norm_sums(
    x_ptr,
    same_x_ptr,
    partial_ptr,
    rows,
    channels,
    parts,
    step,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums over rows of ``x - x[first pixel]`` and of its square, for each channel."""
    image, first, last, channel = _place(parts, rows, step, CHANNELS)
    pixel = same_x_ptr + image * rows * channels + channel
    shift = tl.load(pixel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    one = tl.zeros((ROWS, CHANNELS), tl.float32)
    two = tl.zeros((ROWS, CHANNELS), tl.float32)
    for at in range(first, last, ROWS):
        pointers, mask = _tile(x_ptr, image, at, last, rows, channels, channel, ROWS)
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - shift, 0.0)
        one += x
        two += x * x
    _store_sums(partial_ptr, parts, channels, channel, tl.sum(one, axis=0), tl.sum(two, axis=0))


@triton.jit
def group_norm_stats(
    x_ptr,
    partial_ptr,
    stats_ptr,
    rows,
    channels,
    groups,
    parts,
    eps,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Mean and reciprocal deviation of a group, from the sums of its channels."""
    image = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    width = channels // groups
    lane = tl.arange(0, WIDTH)
    channel = group * width + lane
    inside = lane < width
    one = tl.zeros((PARTS, WIDTH), tl.float32)
    two = tl.zeros((PARTS, WIDTH), tl.float32)
    for at in range(0, parts, PARTS):
        part = at + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        start = (image * parts + part) * 2 * channels
        pointers = partial_ptr + start[:, None] + channel[None, :]
        one += tl.load(pointers, mask=mask, other=0.0)
        two += tl.load(pointers + channels, mask=mask, other=0.0)
    s = tl.sum(one, axis=0)
    q = tl.sum(two, axis=0)
    pixel = x_ptr + image * rows * channels + channel
    shift = tl.load(pixel, mask=inside, other=0.0).to(tl.float32)
    means = tl.where(inside, shift + s / rows, 0.0)
    mean = tl.sum(means, axis=0) / width
    apart = tl.where(inside, means - mean, 0.0)
    spread = tl.where(inside, q - s * s / rows, 0.0) / rows
    variance = tl.sum(spread + apart * apart, axis=0) / width
    out = stats_ptr + tl.program_id(0).to(tl.int64) * 2
    tl.store(out, mean)
    # A rounding may leave a constant group a negative variance; a nan is to stay one.
    variance = tl.where(variance < 0.0, 0.0, variance)
    tl.store(out + 1, 1.0 / tl.sqrt_rn(variance + eps))


@triton.jit
def group_norm_forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    y_ptr,
    rows,
    channels,
    groups,
    parts,
    step,
    HAS_WEIGHT: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``y = act((x - mean) * rstd * weight + bias)``."""
    image, first, last, channel = _place(parts, rows, step, CHANNELS)
    mean, rstd = _of_groups(stats_ptr, image, channel, channels, groups)
    weight = _of_channels(weight_ptr, channel, channels, 1.0, HAS_WEIGHT)
    bias = _of_channels(bias_ptr, channel, channels, 0.0, HAS_WEIGHT)
    for at in range(first, last, ROWS):
        pointers, mask = _tile(x_ptr, image, at, last, rows, channels, channel, ROWS)
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean[None, :]) * rstd[None, :] * weight[None, :] + bias[None, :]
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        pointers, mask = _tile(y_ptr, image, at, last, rows, channels, channel, ROWS)
        tl.store(pointers, y, mask=mask)


@triton.jit
def _slope(dy, x_hat, weight, bias, SILU: tl.constexpr):
    """Gradient with respect to what the activation is applied to."""
    if SILU:
        z = x_hat * weight + bias
        gate = 1.0 / (1.0 + tl.exp(-z))
        dy = dy * gate * (1.0 + z * (1.0 - gate))
    return dy


@triton.jit
def group_norm_grad_sums(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    partial_ptr,
    rows,
    channels,
    groups,
    parts,
    step,
    HAS_WEIGHT: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums over rows of ``dz`` and of ``dz * x_hat``, for each channel."""
    image, first, last, channel = _place(parts, rows, step, CHANNELS)
    mean, rstd = _of_groups(stats_ptr, image, channel, channels, groups)
    weight = _of_channels(weight_ptr, channel, channels, 1.0, HAS_WEIGHT)
    bias = _of_channels(bias_ptr, channel, channels, 0.0, HAS_WEIGHT)
    one = tl.zeros((ROWS, CHANNELS), tl.float32)
    two = tl.zeros((ROWS, CHANNELS), tl.float32)
    for at in range(first, last, ROWS):
        pointers, mask = _tile(x_ptr, image, at, last, rows, channels, channel, ROWS)
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        pointers, mask = _tile(dy_ptr, image, at, last, rows, channels, channel, ROWS)
        dy = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        x_hat = (x - mean[None, :]) * rstd[None, :]
        dz = _slope(dy, x_hat, weight[None, :], bias[None, :], SILU)
        dz = tl.where(mask, dz, 0.0)
        one += dz
        two += tl.where(mask, dz * x_hat, 0.0)
    _store_sums(partial_ptr, parts, channels, channel, tl.sum(one, axis=0), tl.sum(two, axis=0))


@triton.jit
def group_norm_grad_stats(
    partial_ptr,
    weight_ptr,
    sums_ptr,
    means_ptr,
    rows,
    channels,
    groups,
    parts,
    HAS_WEIGHT: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Join partial sums: those of each channel, and the means over a group times the weight."""
    image = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    width = channels // groups
    lane = tl.arange(0, WIDTH)
    channel = group * width + lane
    inside = lane < width
    one = tl.zeros((PARTS, WIDTH), tl.float32)
    two = tl.zeros((PARTS, WIDTH), tl.float32)
    for at in range(0, parts, PARTS):
        part = at + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        start = (image * parts + part) * 2 * channels
        pointers = partial_ptr + start[:, None] + channel[None, :]
        one += tl.load(pointers, mask=mask, other=0.0)
        two += tl.load(pointers + channels, mask=mask, other=0.0)
    a = tl.sum(one, axis=0)
    b = tl.sum(two, axis=0)
    out = sums_ptr + image * 2 * channels + channel
    tl.store(out, a, mask=inside)
    tl.store(out + channels, b, mask=inside)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        a = a * weight
        b = b * weight
    count = rows * 1.0 * width
    out = means_ptr + tl.program_id(0).to(tl.int64) * 2
    tl.store(out, tl.sum(a, axis=0) / count)
    tl.store(out + 1, tl.sum(b, axis=0) / count)


@triton.jit
def group_norm_backward(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    means_ptr,
    dx_ptr,
    rows,
    channels,
    groups,
    parts,
    step,
    HAS_WEIGHT: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``dx = rstd * (weight * dz - mean(weight * dz) - x_hat * mean(weight * dz * x_hat))``."""
    image, first, last, channel = _place(parts, rows, step, CHANNELS)
    mean, rstd = _of_groups(stats_ptr, image, channel, channels, groups)
    level, tilt = _of_groups(means_ptr, image, channel, channels, groups)
    weight = _of_channels(weight_ptr, channel, channels, 1.0, HAS_WEIGHT)
    bias = _of_channels(bias_ptr, channel, channels, 0.0, HAS_WEIGHT)
    for at in range(first, last, ROWS):
        pointers, mask = _tile(x_ptr, image, at, last, rows, channels, channel, ROWS)
        x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        pointers, mask = _tile(dy_ptr, image, at, last, rows, channels, channel, ROWS)
        dy = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        x_hat = (x - mean[None, :]) * rstd[None, :]
        dz = _slope(dy, x_hat, weight[None, :], bias[None, :], SILU)
        dx = rstd[None, :] * (dz * weight[None, :] - level[None, :] - x_hat * tilt[None, :])
        pointers, mask = _tile(dx_ptr, image, at, last, rows, channels, channel, ROWS)
        tl.store(pointers, dx, mask=mask)


class _Shape:
    """How an image is cut into programs."""

    def __init__(self, x: torch.Tensor, groups: int) -> None:
        self.images, self.channels = x.shape[:2]
        self.rows = x.numel() // max(1, self.images * self.channels)
        self.groups = groups
        self.block = tile_channels(self.channels)
        self.height = TILE // self.block
        columns = triton.cdiv(self.channels, self.block)
        parts = max(1, PROGRAMS // max(1, self.images * columns))
        blocks = triton.cdiv(self.rows, self.height)
        self.step = triton.cdiv(blocks, min(parts, blocks)) * self.height
        self.parts = triton.cdiv(self.rows, self.step)
        self.grid = (self.images * self.parts, columns)

    @property
    def tiles(self) -> dict[str, Any]:
        return {"ROWS": self.height, "CHANNELS": self.block, "num_warps": WARPS}

    @property
    def joins(self) -> dict[str, Any]:
        width = triton.next_power_of_2(self.channels // self.groups)
        parts = triton.next_power_of_2(min(self.parts, max(1, JOINED // width)))
        return {"PARTS": parts, "WIDTH": width, "num_warps": WARPS}

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        shape = (self.images * self.parts, 2, self.channels)
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    def of_groups(self, x: torch.Tensor) -> torch.Tensor:
        shape = (self.images, self.groups, 2)
        return torch.empty(shape, dtype=torch.float32, device=x.device)


def tile_channels(channels: int) -> int:
    """Channels of a tile: as many as leave at most an eighth of the threads without work."""
    for block in (512, 256, 128, 64, 32):
        if triton.cdiv(channels, block) * block - channels <= channels // 8:
            return block
    return 16


def forward(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``y`` like ``x`` and ``stats``, float32 ``(images, groups, 2)``: mean and 1 / std.

    Args:
        x: ``(images, channels, ...)``, not empty, its channels last in memory.
        groups: Divides the channels.
        weight: ``(channels,)``; ``None`` together with ``bias``.
        bias: ``(channels,)``.
        eps: Added to the variance.
        silu: Whether to apply SiLU.
    """
    shape = _Shape(x, groups)
    y, stats, partial = torch.empty_like(x), shape.of_groups(x), shape.partial(x)
    sizes = (shape.rows, shape.channels, groups, shape.parts)
    with torch.cuda.device(x.device if x.is_cuda else -1):
        group_norm_sums[shape.grid](
            x, x, partial, shape.rows, shape.channels, shape.parts, shape.step, **shape.tiles
        )
        group_norm_stats[(shape.images * groups,)](x, partial, stats, *sizes, eps, **shape.joins)
        group_norm_forward[shape.grid](
            x, weight, bias, stats, y, *sizes, shape.step,
            HAS_WEIGHT=weight is not None, SILU=silu, **shape.tiles,
        )  # fmt: skip
    return y, stats


def backward(
    dy: torch.Tensor,
    stats: torch.Tensor,
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``dx`` and the sums over images for bias and weight, float32 ``(2, channels)``.

    Args:
        dy: Like ``x``, in memory too.
        stats: From :func:`forward`.
        x: As for :func:`forward`.
        groups: As for :func:`forward`.
        weight: As for :func:`forward`.
        bias: As for :func:`forward`.
        silu: As for :func:`forward`.
    """
    shape = _Shape(x, groups)
    dx, means, partial = torch.empty_like(x), shape.of_groups(x), shape.partial(x)
    sums = torch.empty(shape.images, 2, shape.channels, dtype=torch.float32, device=x.device)
    sizes = (shape.rows, shape.channels, groups, shape.parts)
    flags = {"HAS_WEIGHT": weight is not None, "SILU": silu}
    with torch.cuda.device(x.device if x.is_cuda else -1):
        group_norm_grad_sums[shape.grid](
            dy, x, weight, bias, stats, partial, *sizes, shape.step, **flags, **shape.tiles
        )
        group_norm_grad_stats[(shape.images * groups,)](
            partial, weight, sums, means, *sizes,
            HAS_WEIGHT=weight is not None, **shape.joins,
        )  # fmt: skip
        group_norm_backward[shape.grid](
            dy, x, weight, bias, stats, means, dx, *sizes, shape.step, **flags, **shape.tiles
        )
    return dx, sums.sum(0)


_GATHER = "two numbers of a group, for each channel"
_CHANNEL = "one number a channel, once for all rows"
_SUM = "two sums a channel for all rows of a program"
_NARROW = {
    "same_x_ptr": "one pixel, as the origin of sums",
    "weight_ptr": _CHANNEL,
    "bias_ptr": _CHANNEL,
    "stats_ptr": _GATHER,
    "means_ptr": _GATHER,
    "partial_ptr": _SUM,
    "sums_ptr": _SUM,
}
_SIZES = ("rows", "channels", "groups", "parts", "step")


def _case(
    kernel: Any,
    name: str,
    variant: str,
    kind: str,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    **constants: Any,
) -> Case:
    signature = {}
    for argument in kernel.arg_names:
        if argument in (*reads, *writes, "same_x_ptr", "x_ptr"):
            signature[argument] = f"*{kind}"
        elif argument.endswith("_ptr"):
            signature[argument] = "*fp32"
        elif argument in _SIZES:
            signature[argument] = "i32"
        elif argument == "eps":
            signature[argument] = "fp32"
    narrow = {a: why for a, why in _NARROW.items() if a in signature and a not in constants}
    if "x_ptr" in signature and "x_ptr" not in reads:
        narrow["x_ptr"] = _NARROW["same_x_ptr"]
    return Case(
        kernel,
        name,
        variant,
        signature=signature,
        constants=constants,
        reads=reads,
        writes=writes,
        narrow=narrow,
        tile=TILE,
        divisible=("channels",),
        options={"num_warps": WARPS},
    )


def cases() -> Iterator[Case]:
    """What is inspected."""
    for kind in ("fp32", "fp16", "bf16"):
        for channels in (64, 512):
            tile: dict[str, Any] = {"ROWS": TILE // channels, "CHANNELS": channels}
            sizes = f"{kind} {channels} channels"
            yield _case(group_norm_sums, "group norm sums", sizes, kind, ("x_ptr",), (), **tile)
            for silu in (False, True):
                how: dict[str, Any] = {"HAS_WEIGHT": True, "SILU": silu, **tile}
                variant = f"{sizes} silu" if silu else sizes
                both = ("dy_ptr", "x_ptr")
                yield _case(
                    group_norm_forward, "group norm forward", variant, kind, ("x_ptr",), ("y_ptr",),
                    **how,
                )  # fmt: skip
                yield _case(
                    group_norm_grad_sums, "group norm grad sums", variant, kind, both, (), **how
                )
                yield _case(
                    group_norm_backward, "group norm backward", variant, kind, both, ("dx_ptr",),
                    **how,
                )  # fmt: skip
        plain: dict[str, Any] = {
            "HAS_WEIGHT": False, "SILU": False, "weight_ptr": None, "bias_ptr": None,
            "ROWS": TILE // 64, "CHANNELS": 64,
        }  # fmt: skip
        yield _case(
            group_norm_forward, "group norm forward", f"{kind} no weight", kind, ("x_ptr",),
            ("y_ptr",), **plain,
        )  # fmt: skip
        joins = {"PARTS": 64, "WIDTH": 16}
        yield _case(group_norm_stats, "group norm stats", kind, kind, (), (), **joins)
    yield _case(
        group_norm_grad_stats, "group norm grad stats", "fp32", "fp32", (), (),
        HAS_WEIGHT=True, PARTS=64, WIDTH=16,
    )  # fmt: skip
