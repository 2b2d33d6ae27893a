"""Norms over lists of tensors: one read of every element, float32 sums, nothing waits.

    square_sums[i] = sum((factor * x_i)^2)
    l2_norms[i]    = sqrt(square_sums[i])
    max_norms[i]   = max(|factor * x_i|)
    l2_norm        = sqrt(sum over all lists of square_sums)

Sums run in float32 (float64 for float64 tensors), always in the same order: a result is repeated
bit for bit. A list may mix dtypes and devices; what comes out is on the first tensor's device.
Squares that exceed the largest float32, of elements above 1.8e19, give inf.

On a CPU, torch's own norm of a whole float32 tensor keeps one running sum per vector lane: 7.6e-4
off for 2**24 elements. Here it runs over rows of 1,024 elements, whose norms are joined in float64:
nearly as fast (1.6 against 1.4 ms), and rounded once. Shorter tensors are summed in
float64, all of them at once. 16-bit tensors are widened in pieces that stay in
the cache: 6 ms where torch's norm takes 33.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from apex.ops import _runtime
from apex.ops.multi_tensor import (
    Column,
    Scalar,
    Update,
    Values,
    flattened,
    grouped,
    raise_flag,
    run,
)

# Elements whose norm torch computes at once. Its error, mostly a bias, grows with their number:
# at most 1.5e-7 for float32 and 1.1e-7 for bfloat16 here, 2.1e-7 and 4.4e-7 for 4,096.
ROW = 1024
# Elements of a 16-bit tensor that are widened at a time: 512 KiB of float32, which fits an L2.
PIECE = 2**17


def _squares(values: Values, scalars: Sequence[Any], own: Sequence[Any]) -> Values:
    return (values[0] * scalars[0]).square(), values[0]


def _sizes(values: Values, scalars: Sequence[Any], own: Sequence[Any]) -> Values:
    return (values[0] * scalars[0]).abs(), values[0]


SQUARES = Update(_squares, "norms:squares")
SIZES = Update(_sizes, "norms:sizes")


def square_sums(
    column: Column, *, factor: Scalar = 1.0, flag: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum the squares of each tensor.

    Args:
        column: Tensors of any dtypes, devices and sizes.
        factor: What elements are multiplied by first; a one-element tensor is read on its device.
        flag: One-element tensor of any dtype; it becomes 1 if an element is not finite.

    Returns:
        float32 ``(tensors,)``.
    """
    return _each(SQUARES, column, factor, flag)


def l2_norms(
    column: Column, *, factor: Scalar = 1.0, flag: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the Euclidean norm of each tensor; as :func:`square_sums`."""
    return square_sums(column, factor=factor, flag=flag).sqrt()


def max_norms(
    column: Column, *, factor: Scalar = 1.0, flag: torch.Tensor | None = None
) -> torch.Tensor:
    """Find the largest size in each tensor, 0 for an empty one; as :func:`square_sums`."""
    return _each(SIZES, column, factor, flag)


def l2_norm(
    column: Column, *, factor: Scalar = 1.0, flag: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the Euclidean norm of all elements together.

    Returns:
        float32, 0-dim; as :func:`square_sums` otherwise.
    """
    return total(square_sums(column, factor=factor, flag=flag))


def total(sums: torch.Tensor) -> torch.Tensor:
    """Join what :func:`square_sums` returned into one norm, 0-dim."""
    return sums.sum().sqrt()


@torch.no_grad()
def _each(
    update: Update, column: Column, factor: Scalar, flag: torch.Tensor | None
) -> torch.Tensor:
    if not column:
        return torch.zeros(0)
    device = column[0].device
    parts, order = [], []
    for numbers, (tensors,) in grouped([column]):
        here = tensors[0].device
        parts.append(
            _of_one_kind(update, tensors, _moved(factor, here), flag).to(device, non_blocking=True)
        )
        order += numbers
    if len(parts) == 1:
        return parts[0]
    out = torch.empty(len(column), device=device)
    out[torch.tensor(order).to(device, non_blocking=True)] = torch.cat(parts)
    return out


def _moved(factor: Scalar, device: torch.device) -> Scalar:
    if not isinstance(factor, torch.Tensor):
        return factor
    return factor.to(device, torch.float32, non_blocking=True).reshape(())


def _of_one_kind(
    update: Update, tensors: Column, factor: Scalar, flag: torch.Tensor | None
) -> torch.Tensor:
    """As :func:`_each`, for tensors of one device and one dtype."""
    device = tensors[0].device
    if device.type == "cpu" and _runtime.forced() is None:
        return _on_host(update, tensors, float(factor), flag)
    mine = flag if flag is None or flag.device == device else torch.zeros_like(flag, device=device)
    found = run(
        update, [tensors], (), (factor,), sums=(0,), flag=mine, flags=(1,), largest=update is SIZES
    )
    assert found is not None  # there are sums
    if flag is not None and mine is not None and mine is not flag:
        flag.masked_fill_(mine.to(flag.device, non_blocking=True) != 0, 1)
    return found[0]


# -- torch's reductions on the CPU ---------------------------------------------------------------


def _on_host(
    update: Update, tensors: Column, factor: float, flag: torch.Tensor | None
) -> torch.Tensor:
    found = _host_sizes(tensors, factor) if update is SIZES else _host_squares(tensors, factor)
    if flag is not None and not found.isfinite().all():  # a sum of finite squares may overflow
        raise_flag(flag, tensors)
    return found


def _host_sizes(tensors: Column, factor: float) -> torch.Tensor:
    full = [x for x in tensors if x.numel()]
    found = iter(torch._foreach_norm(full, float("inf")) if full else ())
    zero = tensors[0].new_zeros(())
    sizes = torch.stack([next(found) if x.numel() else zero for x in tensors])
    return (sizes.to(torch.promote_types(sizes.dtype, torch.float32)) * factor).abs().float()


def _host_squares(tensors: Column, factor: float) -> torch.Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    as_it_is = factor == 1.0 and tensors[0].dtype == wide
    small: list[torch.Tensor] = []  # tensors, and ends, no longer than a row
    owners: list[int] = []
    rows: list[torch.Tensor] = []
    row_owners: list[int] = []
    for number, x in enumerate(tensors):
        size = x.numel()
        if size > ROW:
            row = _row_length(size)
            end = size % row
            if end or not x.is_contiguous():
                x = x.reshape(-1)
            whole = x[:-end] if end else x
            rows.append(_row_norms(whole, row, None if as_it_is else wide, factor))
            row_owners.append(number)
            if not end:
                continue
            x = x[-end:]
        small.append(x)
        owners.append(number)
    if not rows:
        return small_squares(small, factor).float()
    counts = torch.tensor([*map(torch.Tensor.numel, rows)])
    sums = torch.segment_reduce(torch.cat(rows).double().square_(), "sum", lengths=counts)
    if small:
        sums = torch.cat([sums, small_squares(small, factor)])
    index = torch.tensor([*row_owners, *owners])
    return torch.zeros(len(tensors), dtype=torch.float64).index_add_(0, index, sums).float()


def small_squares(tensors: Column, factor: float = 1.0) -> torch.Tensor:
    """Sum the squares of each of many short tensors on the CPU, all at once in float64.

    1,000 tensors of 1 to 100 elements take 0.4 ms, torch's foreach norm of them 1.2.
    """
    flat = flattened(tensors)  # may be the only tensor itself
    return segment_squares(flat, torch.tensor([*map(torch.Tensor.numel, tensors)]), factor)


def segment_squares(flat: torch.Tensor, lengths: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Sum the squares of segments of a flat tensor of the CPU, in float64.

    Args:
        flat: Tensors one after the other.
        lengths: Their numbers of elements.
        factor: What elements are multiplied by first.
    """
    values = flat.to(torch.float64, copy=True)
    if factor != 1.0:  # what float32 makes of it, as elsewhere
        wide = torch.promote_types(flat.dtype, torch.float32)
        values.mul_(torch.tensor(factor, dtype=wide).item())
    return torch.segment_reduce(values.square_(), "sum", lengths=lengths)


@functools.lru_cache(maxsize=4096)
def _row_length(size: int) -> int:
    """A length of about ``ROW`` or below that divides ``size``, so that no end is left over."""
    return next((row for row in range(ROW, ROW // 4, -1) if size % row == 0), ROW)


def _row_norms(x: torch.Tensor, row: int, wide: torch.dtype | None, factor: float) -> torch.Tensor:
    if wide is None:
        norms: torch.Tensor = torch.linalg.vector_norm(x.view(-1, row), dim=1)
        return norms
    parts: list[torch.Tensor] = []
    flat = x.view(-1)
    size = PIECE // row * row  # so that rows are those of the widened tensor as a whole
    scratch = torch.empty(min(size, flat.numel()), dtype=wide)
    for piece in torch.split(flat, size):
        values = scratch[: piece.numel()].copy_(piece)
        if factor != 1.0:
            values.mul_(factor)
        parts.append(torch.linalg.vector_norm(values.view(-1, row), dim=1))
    return torch.cat(parts)
