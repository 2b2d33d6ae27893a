"""Scaling and adding lists of tensors, with a flag for what is not finite.

    scale:  out = factor * x
    axpby:  out = a * x + b * y

Inputs are widened to float32, the result is rounded once. The flag looks at the inputs: a finite
input whose result is too large for ``out`` does not set it.

On a CPU torch's fused check-and-unscale does both at once, in place: 1.7 ms for 10 million float32
elements, where the definition takes 30. What is not in place is copied into ``out`` first, or where
``out`` is not float32 into float32 scratch, in pieces that stay in the cache. The flag of ``axpby``
costs no look at ``y``: a finite result has no input that is not finite.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from apex.ops import _runtime
from apex.ops.multi_tensor import (
    FUSABLE,
    Column,
    Scalar,
    Update,
    Values,
    batches,
    grouped,
    raise_flag,
    run,
)
from apex.ops.norms import square_sums

# Elements that are taken at once on a CPU: 1 MiB of each column. axpby of 10 million takes 6.9 ms
# with 2**18, 8.0 with 2**16, 8.8 whole (EPYC, one thread).
PIECE = 2**18
# From so many tensors in a piece on, those are so small that calls count and not passes.
MANY = 32


def scale_reference(values: Values, scalars: Sequence[Any], own: Sequence[Any]) -> Values:
    """Compute the definition: the result, then what is checked and what is summed."""
    x = values[0]
    return x * scalars[0], x, x.square()


def axpby_reference(values: Values, scalars: Sequence[Any], own: Sequence[Any]) -> Values:
    """Compute the definition: the result, then what is checked."""
    x, y = values[:2]
    return scalars[0] * x + scalars[1] * y, x, y


SCALE = Update(scale_reference, "scale:scale")
AXPBY = Update(axpby_reference, "scale:axpby")


@torch.no_grad()
def scale_(
    x: Column, out: Column, factor: Scalar, flag: torch.Tensor | None = None, *, norms: bool = False
) -> torch.Tensor | None:
    """Write ``factor * x`` into ``out``.

    Args:
        x: Tensors on one device; dtypes may be mixed.
        out: Of the same sizes; may be the same tensors.
        factor: Number, or one-element tensor, which is read on the device.
        flag: One-element tensor on the device; it becomes 1 if an element of ``x`` is not finite.
        norms: Whether to measure ``x`` on the way.

    Returns:
        With ``norms`` the sum of the squares of each tensor of ``x``, float32 ``(tensors,)``.
    """
    sums = torch.zeros(len(x), device=x[0].device) if norms and x else None
    for numbers, columns in grouped([x, out]):
        if _torch_can(columns):
            if sums is not None:
                sums[numbers] = square_sums(columns[0])
            _scale_on_host(columns, factor, flag)
            continue
        found = run(
            SCALE,
            columns,
            ((1, 0),),
            (factor,),
            sums=(2,) if norms else (),
            flag=flag,
            flags=(1,),
        )
        if sums is not None and found is not None:
            index = torch.tensor(numbers).to(sums.device, non_blocking=True)
            sums[index] = found[0]
    return sums


@torch.no_grad()
def axpby_(
    x: Column,
    y: Column,
    out: Column,
    a: Scalar,
    b: Scalar,
    flag: torch.Tensor | None = None,
    *,
    checked: tuple[bool, bool] = (True, True),
) -> None:
    """Write ``a * x + b * y`` into ``out``.

    Args:
        x: Tensors on one device; dtypes may be mixed.
        y: Of the same sizes.
        out: Of the same sizes; may be the tensors of ``x`` or ``y``.
        a: Number, or one-element tensor, which is read on the device.
        b: The same.
        flag: One-element tensor on the device; it becomes 1 if a checked input is not finite.
        checked: Whether ``x`` and ``y`` are looked at.
    """
    flags = tuple(number for number, wanted in zip((1, 2), checked, strict=True) if wanted)
    for _, columns in grouped([x, y, out]):
        if _torch_can(columns):
            _axpby_on_host(columns, float(a), float(b), flag, checked)
            continue
        run(AXPBY, columns, ((2, 0),), (a, b), flag=flag, flags=flags)


# -- torch's check-and-unscale on the CPU --------------------------------------------------------


def _torch_can(columns: Sequence[Column]) -> bool:
    """Whether torch's kernels do what the definition does: nothing forced, on a CPU, dense."""
    if _runtime.forced() or columns[0][0].device.type != "cpu":
        return False
    if any(column[0].dtype not in FUSABLE - {torch.int16} for column in columns):
        return False
    if len(columns) == 2 and _are_same(*columns):
        return True
    return all(all(map(torch.Tensor.is_contiguous, column)) for column in columns)


def _scale_on_host(columns: Sequence[Column], factor: Scalar, flag: torch.Tensor | None) -> None:
    x, out = columns
    found, number = torch.zeros(1), torch.tensor([float(factor)])
    if _are_same(x, out):
        torch._amp_foreach_non_finite_check_and_unscale_(list(out), found, number)
    else:
        direct = out[0].dtype in (torch.float32, x[0].dtype)
        for _, (some, targets) in batches(columns, PIECE):
            work = targets if direct else _scratch(targets)
            torch._foreach_copy_(work, some)
            torch._amp_foreach_non_finite_check_and_unscale_(work, found, number)
            if not direct:
                torch._foreach_copy_(targets, work)
    if flag is not None and found.item():
        flag.fill_(1)


def _axpby_on_host(
    columns: Sequence[Column],
    a: float,
    b: float,
    flag: torch.Tensor | None,
    checked: tuple[bool, bool],
) -> None:
    x, y, out = columns
    if _are_same(y, out):  # what is overwritten goes first
        x, y, a, b, checked = y, x, b, a, (checked[1], checked[0])
    direct = out[0].dtype == torch.float32 and not _meet(y, out)
    in_place = direct and _meet(x, out)
    found, factor = torch.zeros(1), torch.tensor([a])
    for _, (some, others, targets) in batches([x, y, out], PIECE):
        work = targets if direct else _scratch(targets)
        if in_place or some[0].dtype != torch.float32 or len(work) > MANY:
            torch._foreach_copy_(work, some)
            torch._amp_foreach_non_finite_check_and_unscale_(work, found, factor)
        else:
            for target, tensor in zip(work, some, strict=True):
                torch.mul(tensor, a, out=target)
        torch._foreach_add_(work, others, alpha=b)
        if flag is not None and not _surely_finite(work):
            suspects = (not in_place and checked[0], some), (checked[1], others)
            raise_flag(flag, [tensor for look, column in suspects if look for tensor in column])
        if not direct:
            torch._foreach_copy_(targets, work)
    if flag is not None and in_place and checked[0] and found.item():
        flag.fill_(1)


def _surely_finite(column: Column) -> bool:
    """Whether all is finite; ``False`` may also mean that a sum was too large."""
    if len(column) <= MANY:
        return all(math.isfinite(tensor.sum().item()) for tensor in column)
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(list(column), found, torch.ones(1))
    return not found.item()


def _scratch(column: Column) -> list[torch.Tensor]:
    return [torch.empty_like(tensor, dtype=torch.float32) for tensor in column]


def _meet(column: Column, other: Column) -> bool:
    """Whether some memory is in both columns."""
    mine, theirs = ({*map(torch.Tensor.data_ptr, tensors)} for tensors in (column, other))
    return not mine.isdisjoint(theirs)


def _are_same(column: Column, other: Column) -> bool:
    """Whether two columns are the same memory, tensor by tensor."""
    if all(map(operator.is_, column, other)):
        return True
    if column[0].dtype != other[0].dtype:
        return False
    pairs = zip(column, other, strict=True)
    return all(a.data_ptr() == b.data_ptr() and a.stride() == b.stride() for a, b in pairs)
