"""Scaling and adding lists of tensors, with a flag for what is not finite.

    scale:  out = factor * x
    axpby:  out = a * x + b * y

Inputs are widened to float32, the result is rounded once. The flag looks at the inputs: a finite
input whose result is too large for ``out`` does not set it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apex.ops.multi_tensor import Column, Scalar, Update, Values, grouped, run


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
        run(AXPBY, columns, ((2, 0),), (a, b), flag=flag, flags=flags)
