"""``amp_C``: scaling, adding and norms of lists of tensors, and the loss scale."""

from __future__ import annotations

import torch

from apex.multi_tensor_apply._amp_c.arguments import (
    Lists,
    Number,
    checked,
    entry,
    flag_to_set,
    number,
)
from apex.ops.lists.loss_scale import update_
from apex.ops.lists.scale import axpby_, scale_
from apex.ops.lists.tensor_norms import square_sums

Norms = tuple[torch.Tensor, torch.Tensor]


@entry
def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: Number, /
) -> None:
    """``[in, out]``: write ``scale * in``, rounded once; ``out`` may be ``in``.

    Sets the flag if an element of ``in`` is not finite. Such elements are written all the same, and
    a finite one that becomes too large for ``out`` is not reported.
    """
    x, out = checked("multi_tensor_scale", tensor_lists, (2,))
    device = x[0].device
    with flag_to_set(noop_flag, device) as flag:
        scale_(x, out, number(scale, device), flag)


@entry
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    a: Number,
    b: Number,
    arg_to_check: int,
    /,
) -> None:
    """``[x, y, out]``: write ``a * x + b * y``, rounded once; ``out`` may be ``x`` or ``y``.

    Sets the flag if an element is not finite: of both inputs for ``arg_to_check`` -1, of ``x`` for
    0, of ``y`` for 1.
    """
    x, y, out = checked("multi_tensor_axpby", tensor_lists, (3,))
    if arg_to_check not in (-1, 0, 1):
        raise RuntimeError(
            f"multi_tensor_axpby: arg_to_check was {arg_to_check}; allowed are -1 (both inputs), "
            "0 (x) and 1 (y)."
        )
    device = x[0].device
    with flag_to_set(noop_flag, device) as flag:
        which = (arg_to_check != 1, arg_to_check != 0)
        axpby_(x, y, out, number(a, device), number(b, device), flag, checked=which)


@entry
def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor_python: bool | None,
    /,
) -> Norms:
    """``[x]``: Euclidean norm of everything, float32 ``(1,)``, and on request of each tensor.

    Sets the flag if the norm is not finite, be it that squares exceed float32.
    """
    (x,) = checked("multi_tensor_l2norm", tensor_lists, (1,))
    return _norms(square_sums(x), noop_flag, per_tensor_python)


@entry
def multi_tensor_l2norm_mp(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor_python: bool | None,
    /,
) -> Norms:
    """As :func:`multi_tensor_l2norm`.

    The original leaves the result undefined where the flag is set; here it is the norm.
    """
    (x,) = checked("multi_tensor_l2norm_mp", tensor_lists, (1,))
    return _norms(square_sums(x), noop_flag, per_tensor_python)


@entry
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    scale: Number,
    per_tensor_python: bool | None,
    /,
) -> Norms:
    """``[in, out]``: write ``scale * in`` and measure ``in``, as :func:`multi_tensor_l2norm`."""
    x, out = checked("multi_tensor_l2norm_scale", tensor_lists, (2,))
    sums = scale_(x, out, number(scale, x[0].device), norms=True)
    assert sums is not None  # asked for
    return _norms(sums, noop_flag, per_tensor_python)


@entry
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: Number,
    per_tensor_python: bool | None,
    /,
) -> Norms:
    """``[x]``: measure ``inv_scale * x``, as :func:`multi_tensor_l2norm`; ``x`` stays."""
    (x,) = checked("multi_tensor_unscale_l2norm", tensor_lists, (1,))
    sums = square_sums(x, factor=number(inv_scale, x[0].device))
    return _norms(sums, noop_flag, per_tensor_python)


def _norms(sums: torch.Tensor, noop_flag: torch.Tensor, per_tensor: bool | None) -> Norms:
    norm = sums.sum().sqrt().reshape(1)
    flag_norms(norm, noop_flag)
    return norm, sums.sqrt() if per_tensor else sums.new_empty(0)


def flag_norms(norms: torch.Tensor, noop_flag: torch.Tensor) -> None:
    """Set the flag if a norm is not finite."""
    with flag_to_set(noop_flag, norms.device) as flag:
        flag.masked_fill_(norms.isfinite().all().logical_not(), 1)


@entry
def update_scale_hysteresis(
    current_scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    /,
) -> torch.Tensor:
    """Update a loss scale and its counters in place, see :mod:`apex.ops.lists.loss_scale`.

    Returns:
        ``current_scale``.
    """
    update_(
        current_scale,
        growth_tracker,
        hysteresis_tracker,
        found_inf,
        growth_factor=float(growth_factor),
        backoff_factor=float(backoff_factor),
        growth_interval=int(growth_interval),
        hysteresis=int(hysteresis),
    )
    return current_scale
