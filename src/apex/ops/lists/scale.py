"""Scaling, measuring and adding lists of tensors, with a flag for what is not finite.

    scale:  out = factor * x          and what norms are made of: see `SCALE`
    axpby:  out = a * x + b * y

Inputs are widened to float32, the result is rounded once. The flag looks at the inputs: a finite
input whose result is too large for ``out`` does not set it.
"""

from __future__ import annotations

from collections import namedtuple

import torch

from apex._compat import private
from apex.ops import _runtime
from apex.ops.lists.multi_tensor import Update, Values, run
from apex.ops.lists.overlaps import each_once, put_back
from apex.ops.lists.tensor_lists import Scalar, TensorList, grouped, merged, odd_positions

ScaleScalars = namedtuple("ScaleScalars", "factor")
AxpbyScalars = namedtuple("AxpbyScalars", "a b")

# What scaling computes, by its number; a kernel drops what is neither stored nor summed.
SCALED, GIVEN, GIVEN_SQUARE, SQUARE, MAGNITUDE = range(5)


def scale_reference(values: Values, s: ScaleScalars) -> Values:
    """Compute the definition."""
    x, scaled = values[0], values[0] * s.factor
    return scaled, x, x.square(), scaled.square(), scaled.abs()


def axpby_reference(values: Values, s: AxpbyScalars) -> Values:
    """Compute the definition: the result, then what is checked."""
    x, y = values[:2]
    return s.a * x + s.b * y, x, y


SCALE = Update(scale_reference, "scale:scale", ScaleScalars)
AXPBY = Update(axpby_reference, "scale:axpby", AxpbyScalars)


@torch.no_grad()
def scale_(
    x: TensorList,
    out: TensorList,
    factor: Scalar,
    flag: torch.Tensor | None = None,
    *,
    norms: bool = False,
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
    parts = []
    for positions, columns, dense in grouped([x, out]):
        x, out = columns
        once = each_once(out)
        if not norms and _scale_on_cpu(x, once, factor, flag, dense=dense):
            put_back(out, once)
            continue
        sums = (GIVEN_SQUARE,) if norms else ()
        found = run(
            SCALE, [x, once], ((1, SCALED),), ScaleScalars(factor), sums=sums, flag=flag,
            flags=(GIVEN,), dense=dense,
        )  # fmt: skip
        put_back(out, once)
        if found is not None:
            parts.append((positions, found[0]))
    return merged(parts) if parts else None


@torch.no_grad()
def axpby_(
    x: TensorList,
    y: TensorList,
    out: TensorList,
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
    for _, (*inputs, outs), dense in grouped([x, y, out]):
        once = each_once(outs)
        columns = [*inputs, once]
        run(AXPBY, columns, ((2, 0),), AxpbyScalars(a, b), flag=flag, flags=flags, dense=dense)
        put_back(outs, once)


# -- torch's check-and-unscale on a CPU ----------------------------------------------------------


def _scale_on_cpu(
    x: TensorList, out: TensorList, factor: Scalar, flag: torch.Tensor | None, *, dense: bool
) -> bool:
    """Scale and check in one pass, in place: 1e7 float32 take 1.7 ms, by the definition 30.

    Returns:
        Whether that was done: nothing forced, dense, and rounded once.
    """
    known = x[0].dtype in _runtime.DTYPES and out[0].dtype in (torch.float32, x[0].dtype)
    if _runtime.forced() or not x[0].is_cpu or not known:
        return False
    if not dense and odd_positions([x, out]):
        return False
    found = torch.zeros(1, dtype=torch.float32, device="cpu")
    if any(a.data_ptr() != b.data_ptr() for a, b in zip(x, out, strict=True)):
        private.foreach_copy_(list(out), list(x))
    private.amp_foreach_non_finite_check_and_unscale_(
        list(out), found, found.new_tensor([float(factor)])
    )
    if flag is not None and found.item():
        flag.fill_(1)
    return True
