"""Focal loss, forward and backward: each program computes one block of elements.

See :mod:`apex.ops.losses.focal_loss` for the definition. Programs of the forward leave partial
sums, which ``torch.sum`` adds up in the same order every time. The number of columns is known to
the compiler, which makes multiplications of the divisions that find an element's row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels.inspect.case import Case

BLOCK = 1024  # 4 warps of 32 lanes, 128 bits of 16-bit logits each
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _factors(u, gamma, smoothing, SMOOTH: tl.constexpr, SQUARE: tl.constexpr):
    """``sigmoid(u)``, ``sigmoid(-u)``, ``sigmoid(u)**gamma``, and the cross-entropy."""
    small = tl.exp(-tl.abs(u))
    above = 1.0 + small
    # log(1 + small), exact for a small one too: the rounding of `above` cancels (W. Kahan).
    lost = above == 1.0
    log = tl.where(lost, small, tl.log(above) * tl.div_rn(small, tl.where(lost, 1.0, above - 1.0)))
    loss = tl.maximum(u, 0.0) + log
    if SMOOTH:
        loss -= 0.5 * smoothing * u
    less = tl.div_rn(small, above)
    p, rest = tl.where(u >= 0, 1.0 - less, less), tl.where(u >= 0, less, 1.0 - less)
    power = p * p if SQUARE else tl.exp(gamma * (tl.minimum(u, 0.0) - log))
    return p, rest, power, loss


@triton.jit
def _block(
    logits_ptr, targets_ptr, dy_ptr, positives_ptr, out_ptr, start, offsets, mask,
    classes, alpha, gamma, smoothing,
    COLUMNS: tl.constexpr, SMOOTH: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """Return the sum of a block's terms, or write their gradients, if there is an ``out_ptr``."""
    at = (start % COLUMNS).to(tl.int32) + (offsets - start).to(tl.int32)
    column = at % COLUMNS
    x = tl.load(logits_ptr + offsets, mask).to(tl.float32)
    target = tl.load(targets_ptr + start // COLUMNS + at // COLUMNS, mask).to(tl.int64)
    counts = (target != -2) & (column < classes)
    if mask is not None:
        counts = counts & mask
    sign = tl.where(target == column, -1.0, 1.0)
    weight = tl.where(target == column, alpha, 1.0 - alpha)
    weight = tl.where((target < -2) | (target >= classes), float("nan"), weight)
    u = tl.where(counts, sign * x, 0.0)
    p, rest, power, loss = _factors(u, gamma, smoothing, SMOOTH, SQUARE)
    total = 0.0
    if out_ptr is None:
        total = tl.sum(tl.where(counts, weight * (power * loss), 0.0))
    else:
        slope = gamma * rest * loss + p
        if SMOOTH:
            slope -= 0.5 * smoothing
        scale = tl.load(dy_ptr).to(tl.float32) / tl.load(positives_ptr).to(tl.float32)
        out = tl.where(counts, scale * (sign * weight * (power * slope)), 0.0)
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask)
    return total


@triton.jit
def _focal_loss(
    logits_ptr, targets_ptr, sums_ptr, dy_ptr, positives_ptr, out_ptr,
    size, classes, alpha, gamma, smoothing,
    COLUMNS: tl.constexpr, SMOOTH: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:  # so that accesses without a mask are 128 bits wide
        total = _block(
            logits_ptr, targets_ptr, dy_ptr, positives_ptr, out_ptr, start, offsets, None,
            classes, alpha, gamma, smoothing, COLUMNS, SMOOTH, SQUARE,
        )  # fmt: skip
    else:
        total = _block(
            logits_ptr, targets_ptr, dy_ptr, positives_ptr, out_ptr, start, offsets, offsets < size,
            classes, alpha, gamma, smoothing, COLUMNS, SMOOTH, SQUARE,
        )  # fmt: skip
    if sums_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0), total)


def allocate(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return the loss, uninitialized."""
    return logits.new_empty((), dtype=torch.promote_types(logits.dtype, torch.float32))


def _launch(
    logits: torch.Tensor, pointers: Any, classes: int, alpha: float, gamma: float, smoothing: float
) -> None:
    numbers = (logits.numel(), classes, alpha, gamma, smoothing)
    constants = (logits.shape[-1], smoothing != 0.0, gamma == 2.0, BLOCK)
    _focal_loss[_grid(logits)](logits, *pointers, *numbers, *constants, **OPTIONS)


def _grid(logits: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(logits.numel(), BLOCK),)


def forward(
    logits: torch.Tensor, targets: torch.Tensor, num_positives: torch.Tensor, *numbers: Any
) -> torch.Tensor:
    """Compute the loss."""
    sums = logits.new_empty(_grid(logits), dtype=torch.float32)
    _launch(logits, (targets, sums, None, None, None), *numbers)
    return sums.sum() / num_positives.to(sums.dtype).reshape(())


def backward(
    dy: torch.Tensor, needs: list[bool], *, logits: torch.Tensor, targets: torch.Tensor,
    num_positives: torch.Tensor, **numbers: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Compute the gradient of the logits, which are read again."""
    out = torch.empty_like(logits)
    _launch(logits, (targets, None, dy, num_positives, out), **numbers)
    return [out]


def cases() -> Iterator[Case]:
    """What is compiled and inspected."""
    narrow = {"targets_ptr": "one number a row", "sums_ptr": "one number a program"}
    narrow |= dict.fromkeys(("dy_ptr", "positives_ptr"), "one number")
    numbers = {"size": "i32", "classes": "i32", "alpha": "fp32", "gamma": "fp32"}
    numbers |= {"smoothing": "fp32"}
    ways = {"forward": ("sums_ptr",), "backward": ("dy_ptr", "positives_ptr", "out_ptr")}
    for dtype, square, way in itertools.product(("fp16", "bf16", "fp32"), (False, True), ways):
        kinds = {"targets_ptr": "i64", "logits_ptr": dtype, "out_ptr": dtype}
        names = ("logits_ptr", "targets_ptr", *ways[way])
        pointers = {name: f"*{kinds.get(name, 'fp32')}" for name in names}
        absent = dict.fromkeys(ways["forward" if way == "backward" else "backward"])
        yield Case(
            _focal_loss, "focal_loss", f"{way} {dtype}{' squared' * square}",
            signature=pointers | numbers,
            constants=absent | {"COLUMNS": 91, "SMOOTH": True, "SQUARE": square, "BLOCK": BLOCK},
            reads=("logits_ptr",), writes=tuple({"out_ptr"} & {*ways[way]}), narrow=narrow,
            tile=BLOCK, tail=True, options=OPTIONS,
        )  # fmt: skip
