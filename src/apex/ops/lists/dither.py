"""Columns kept in bfloat16 that are rounded stochastically, by random bits that are reproducible.

A moment moves by less than half an ulp of bfloat16 at most steps: with ``beta2 = 0.999`` a second
moment that is rounded to the nearest never decays. Rounded up as often as the value is nearer to
the upper neighbour, it is right on the average. Low bits beside it would be the 4 bytes of float32.

The random bits are a hash of the float32 value itself and of the step. They need no generator and
no position: they are the same on a CPU and in a kernel, on any number of ranks and after loading.
Where a value stays the same they differ from step to step. The hash multiplies and shifts 32 bits
as the finalizer of MurmurHash3 does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Odd numbers about half of whose bits are 1: 2**32 by the golden ratio, and two of known hashes.
STEP, FIRST, SECOND = 0x9E3779B1 - 2**32, 0x85EBCA6B - 2**32, 0x2545F491


class Dither(NamedTuple):
    """Columns that are rounded stochastically, and :func:`seed_of` the step."""

    columns: tuple[int, ...]
    seed: torch.Tensor


def seed_of(step: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The step as a seed: int32, 0-dim, on a device; a step on a device is not waited for."""
    if isinstance(step, torch.Tensor):
        return step.to(device, torch.int32, non_blocking=True).reshape(()) * STEP
    mixed = step * STEP & 0xFFFFFFFF
    return torch.full((), mixed - (mixed >> 31 << 32), dtype=torch.int32, device=device)


def dithered(value: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16 stochastically; the result is float32. inf and nan stay."""
    bits = value.contiguous().view(torch.int32)
    noise = bits.bitwise_xor(seed).mul_(FIRST)
    noise.bitwise_xor_((noise >> 15).bitwise_and_(0x1FFFF)).mul_(SECOND)
    noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    rounded = noise.add_(bits).bitwise_and_(-65536).view(torch.float32)
    return torch.where(value.isnan(), value, rounded)
