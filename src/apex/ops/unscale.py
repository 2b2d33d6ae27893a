"""Unscale gradients, check them and measure their norm, in one pass over memory.

    out_i = factor * grad_i          sums_i = sum(out_i^2)          flag = any not finite

8 bytes per float32 gradient, 6 per 16-bit gradient that becomes float32: what unscaling alone
costs. Source: the checks of loss scaling, Micikevicius et al., arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from apex.ops import _runtime
from apex.ops.columns import Column, Scalar, grouped, scalar_on, set_flag
from apex.ops.multi_tensor import FUSABLE, Update, Values, run


class UnscaleScalars(NamedTuple):
    """1 / loss scale."""

    factor: Scalar


def reference(values: Values, s: UnscaleScalars) -> Values:
    """Compute the definition: the gradient, its square, and what is checked."""
    grad = values[0] * s.factor
    return grad, grad.square(), values[0]


UNSCALE = Update(reference, "unscale:unscale", UnscaleScalars)


def takes(grads: Column) -> bool:
    """Whether ``grads`` are to go this way: dense, of fusable dtypes, where kernels run.

    Elsewhere torch's own kernels are faster than the definition. A path that was asked for by
    :func:`apex.ops._runtime.use` is taken in any case.
    """
    asked = _runtime.forced() is not None
    return bool(grads) and all(
        type(grad) is torch.Tensor  # a wrapper has no memory of its own
        and grad.dtype in FUSABLE
        and grad.layout == torch.strided
        and (asked or _runtime.can_fuse(grad.device))
        for grad in grads
    )


@torch.no_grad()
def unscale_into(grads: Column, outs: Column, factor: Scalar, flag: torch.Tensor) -> torch.Tensor:
    """Write ``factor * grads`` into ``outs``.

    Args:
        grads: Scaled gradients; devices and dtypes may be mixed.
        outs: Of the same sizes; may be the same tensors.
        factor: Number, or one-element tensor, which is read where the gradients are.
        flag: One-element tensor; it becomes 1 if an element of ``grads`` is not finite.

    Returns:
        The sum of the squares of all that was written; float32, 0-dim, on ``flag``'s device.
    """
    sums = torch.zeros((), dtype=torch.float32, device=flag.device)
    for _, (sources, targets) in grouped([grads, outs]):
        device = sources[0].device
        mine = flag if device == flag.device else torch.zeros_like(flag, device=device)
        same = all(source is target for source, target in zip(sources, targets, strict=True))
        columns, stores = ([sources], ((0, 0),)) if same else ([sources, targets], ((1, 0),))
        scalars = UnscaleScalars(scalar_on(factor, device))
        found = run(UNSCALE, columns, stores, scalars, sums=(1,), flag=mine, flags=(2,))
        assert found is not None  # asked for
        sums = sums + found.sum().to(flag.device, non_blocking=not flag.is_cpu)
        if mine is not flag:
            set_flag(flag, mine)
    return sums
