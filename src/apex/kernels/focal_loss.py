"""Focal loss, forward and backward: each program computes one block of elements.

See :mod:`apex.ops.focal_loss` for the definition. Programs of the forward leave partial sums, which
``torch.sum`` adds up in the same order every time. The number of columns is known to the compiler,
which makes multiplications of the divisions that find an element's row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from apex.kernels._cases import Case

BLOCK = 1024  # 4 warps of 32 lanes, 128 bits of 16-bit logits each
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _element(logits_ptr, targets_ptr, start, offsets, mask, classes, alpha, COLUMNS: tl.constexpr):
    """``u``, its sign and its weight, which is 0 for what does not count."""
    at = (start % COLUMNS).to(tl.int32) + (offsets - start).to(tl.int32)
    column = at % COLUMNS
    x = tl.load(logits_ptr + offsets, mask).to(tl.float32)
    target = tl.load(targets_ptr + start // COLUMNS + at // COLUMNS, mask).to(tl.int64)
    counts = (target != -2) & (column < classes)
    sign = tl.where(target == column, -1.0, 1.0)
    weight = tl.where(target == column, alpha, 1.0 - alpha)
    weight = tl.where((target < -2) | (target >= classes), float("nan"), weight)
    return tl.where(counts, sign * x, 0.0), sign, tl.where(counts, weight, 0.0)


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
    one = tl.div_rn(1.0, above)
    p, rest = tl.where(u >= 0, one, small * one), tl.where(u >= 0, small * one, one)
    power = p * p if SQUARE else tl.exp(gamma * (tl.minimum(u, 0.0) - log))
    return p, rest, power, loss


@triton.jit
def _forward(
    logits_ptr, targets_ptr, sums_ptr, size, classes, alpha, gamma, smoothing,
    COLUMNS: tl.constexpr, SMOOTH: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:  # so that accesses without a mask are 128 bits wide
        u, _, weight = _element(
            logits_ptr, targets_ptr, start, offsets, None, classes, alpha, COLUMNS
        )
    else:
        mask = offsets < size
        u, _, weight = _element(
            logits_ptr, targets_ptr, start, offsets, mask, classes, alpha, COLUMNS
        )
        u, weight = tl.where(mask, u, 0.0), tl.where(mask, weight, 0.0)
    _, _, power, loss = _factors(u, gamma, smoothing, SMOOTH, SQUARE)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(weight * (power * loss)))


@triton.jit
def _backward_block(
    dy_ptr, positives_ptr, logits_ptr, targets_ptr, out_ptr, start, offsets, mask, classes, alpha,
    gamma, smoothing, COLUMNS: tl.constexpr, SMOOTH: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    scale = tl.load(dy_ptr).to(tl.float32) / tl.load(positives_ptr).to(tl.float32)
    u, sign, weight = _element(
        logits_ptr, targets_ptr, start, offsets, mask, classes, alpha, COLUMNS
    )
    p, rest, power, loss = _factors(u, gamma, smoothing, SMOOTH, SQUARE)
    slope = gamma * rest * loss + p
    if SMOOTH:
        slope -= 0.5 * smoothing
    # A row that does not count has gradient 0 whatever the scale is.
    out = tl.where(weight == 0.0, 0.0, scale * (sign * weight * (power * slope)))
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _backward(
    dy_ptr, positives_ptr, logits_ptr, targets_ptr, out_ptr, size, classes, alpha, gamma, smoothing,
    COLUMNS: tl.constexpr, SMOOTH: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        _backward_block(
            dy_ptr, positives_ptr, logits_ptr, targets_ptr, out_ptr, start, offsets, None, classes,
            alpha, gamma, smoothing, COLUMNS, SMOOTH, SQUARE,
        )  # fmt: skip
    else:
        _backward_block(
            dy_ptr, positives_ptr, logits_ptr, targets_ptr, out_ptr, start, offsets, offsets < size,
            classes, alpha, gamma, smoothing, COLUMNS, SMOOTH, SQUARE,
        )  # fmt: skip


def allocate(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return the loss, uninitialized."""
    return logits.new_empty((), dtype=torch.promote_types(logits.dtype, torch.float32))


def _rest(
    logits: torch.Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> tuple[Any, ...]:
    constants = (logits.shape[-1], smoothing != 0.0, gamma == 2.0, BLOCK)
    return logits.numel(), classes, alpha, gamma, smoothing, *constants


def forward(
    logits: torch.Tensor, targets: torch.Tensor, num_positives: torch.Tensor, *numbers: Any
) -> torch.Tensor:
    """Compute the loss."""
    sums = logits.new_empty(triton.cdiv(logits.numel(), BLOCK), dtype=torch.float32)
    _forward[sums.shape](logits, targets, sums, *_rest(logits, *numbers), **OPTIONS)
    return sums.sum() / num_positives.to(sums.dtype).reshape(())


def backward(
    dy: torch.Tensor, needs: list[bool], *, logits: torch.Tensor, targets: torch.Tensor,
    num_positives: torch.Tensor, **numbers: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Compute the gradient of the logits, which are read again."""
    out = torch.empty_like(logits)
    grid = (triton.cdiv(logits.numel(), BLOCK),)
    rest = _rest(logits, **numbers)
    _backward[grid](dy, num_positives, logits, targets, out, *rest, **OPTIONS)
    return [out]


def cases() -> Iterator[Case]:
    """What is compiled and inspected."""
    narrow = {
        "targets_ptr": "one number a row", "sums_ptr": "one number a program",
        "dy_ptr": "one number", "positives_ptr": "one number",
    }  # fmt: skip
    numbers = {"size": "i32", "classes": "i32"}
    numbers |= dict.fromkeys(("alpha", "gamma", "smoothing"), "fp32")
    for dtype in ("fp16", "bf16", "fp32"):
        for kernel, writes in ((_forward, ()), (_backward, ("out_ptr",))):
            for square in (False, True):
                pointers = dict.fromkeys(("logits_ptr", *writes), f"*{dtype}")
                pointers |= {
                    name: "*i64" if name == "targets_ptr" else "*fp32"
                    for name in narrow if name in kernel.arg_names
                }  # fmt: skip
                yield Case(
                    kernel, "focal_loss", f"{kernel.__name__[1:]} {dtype}{' squared' * square}",
                    signature=pointers | numbers,
                    constants={"COLUMNS": 91, "SMOOTH": True, "SQUARE": square, "BLOCK": BLOCK},
                    reads=("logits_ptr",), writes=writes, tile=BLOCK, tail=True, narrow=narrow,
                    options=OPTIONS,
                )  # fmt: skip
