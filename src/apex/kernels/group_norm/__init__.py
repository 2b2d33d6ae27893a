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

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton

from apex.kernels.group_norm.kernels import (
    group_norm_backward,
    group_norm_forward,
    group_norm_grad_stats,
    group_norm_grad_sums,
    group_norm_moments,
    group_norm_stats,
)
from apex.kernels.inspect.case import Case

# Elements of a tile: 16 for each of 128 threads, two 128-bit loads of 16-bit images; with two
# images and two sums that is some 100 registers. Derived, not tuned on a GPU.
TILE = 2048
OPTIONS: dict[str, Any] = {"num_warps": 4}
# Programs that fill a chip: eight for each of an H100's 132 multiprocessors, or nearly so.
PROGRAMS = 1024
# Joining partial sums, one program a group: elements at a time, and dependent steps at most.
JOINED, STEPS = 2048, 64


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
        """Uninitialized float32 ``(images, *shape)``."""
        return x.new_empty((self.images, *shape), dtype=torch.float32)


@functools.cache
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
    group_norm_moments[shape.grid](
        x, partial, shape.rows, shape.channels, shape.parts, shape.step, **shape.tiles
    )
    group_norm_stats[(shape.images * groups,)](
        partial, stats, *shape.sizes, shape.step, eps, **shape.joins
    )
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
    "weight_ptr": _CHANNEL, "bias_ptr": _CHANNEL,
    "stats_ptr": _GATHER, "means_ptr": _GATHER,
    "partial_ptr": _SUM, "sums_ptr": _SUM,
}  # fmt: skip
_READS, _WRITES = ("dy_ptr", "x_ptr"), ("y_ptr", "dx_ptr")


def _case(kernel: Any, words: str, kind: str, **constants: Any) -> Case:
    """A case for images of one type; every pointer of the kernel that is not None is there."""
    images = (*_READS, *_WRITES)
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
            yield _case(group_norm_moments, words, kind, **tile)
            for kernel in (group_norm_forward, group_norm_grad_sums, group_norm_backward):
                for silu in (False, True):
                    yield _case(kernel, words + " silu" * silu, kind, SILU=silu, **tile)
        plain = {"weight_ptr": None, "bias_ptr": None, "SILU": False}
        yield _case(group_norm_forward, f"{kind} no weight", kind, **plain, **tile)
    yield _case(group_norm_stats, "fp32", "fp32", **joins)
    yield _case(group_norm_grad_stats, "fp32", "fp32", **joins)
