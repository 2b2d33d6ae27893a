"""Unscale gradients, check them and measure their norm, in one pass over memory.

    out_i = factor * grad_i          sums_i = sum(out_i^2)          flag = any not finite

8 bytes per float32 gradient, 6 per 16-bit gradient that becomes float32: what unscaling alone
costs. Source: the checks of loss scaling, Micikevicius et al., arXiv:1710.03740, section 3.2.
:func:`unscale_` does the same in place by torch's own kernels, which are the CPU's way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from apex._compat import private
from apex.ops import _runtime
from apex.ops.lists.multi_tensor import FUSABLE, run
from apex.ops.lists.overlaps import each_once, put_back
from apex.ops.lists.scale import GIVEN, SCALE, SCALED, SQUARE, ScaleScalars
from apex.ops.lists.tensor_lists import (
    OWN_MEMORY,
    Scalar,
    TensorList,
    flag_to_set,
    grouped,
    local,
    scalar_on,
)

_KIND: Callable[[torch.Tensor], Any] = attrgetter("device", "dtype", "layout")


def takes(grads: TensorList) -> bool:
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
def unscale_into(
    grads: TensorList, outs: TensorList, factor: Scalar, flag: torch.Tensor
) -> torch.Tensor:
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
    for _, (sources, targets), dense in grouped([grads, outs]):
        device, once = sources[0].device, each_once(targets)
        same = all(source is target for source, target in zip(sources, once, strict=True))
        columns, out = ([sources], 0) if same else ([sources, once], 1)
        scalars = ScaleScalars(scalar_on(factor, device))
        with flag_to_set(flag, device) as mine:
            found = run(
                SCALE, columns, ((out, SCALED),), scalars, sums=(SQUARE,), flag=mine,
                flags=(GIVEN,), dense=dense,
            )  # fmt: skip
        assert found is not None  # asked for
        put_back(targets, once)
        sums = sums + found.sum().to(flag.device, non_blocking=not flag.is_cpu)
    return sums


def inverse(scale: Scalar) -> Scalar:
    """``1 / scale``, a float32 tensor where the scale is one."""
    return scale.reciprocal() if isinstance(scale, torch.Tensor) else 1.0 / scale


def _groups(grads: TensorList) -> list[list[torch.Tensor]]:
    """Real dense tensors that share memory with ``grads``, in lists of one device and dtype.

    That is what the foreach kernels want. Signs are those of the memory, without the negative and
    the conjugate bit, on which neither products nor flags depend. Sparse gradients must be
    coalesced, unless they are only multiplied. Of a DTensor it is the part on this rank: torch's
    own kernel would reduce the flag as the first DTensor of a list asks for, and refuse a list with
    other tensors.
    """
    if not OWN_MEMORY.issuperset(map(type, grads)):
        grads = [*map(local, grads)]
    kinds = list(map(_KIND, grads))
    groups: dict[Any, list[torch.Tensor]] = {kind: [] for kind in kinds}
    if len(groups) == 1:
        groups[kinds[0]] = list(grads)
    else:
        for kind, grad in zip(kinds, grads, strict=True):
            groups[kind].append(grad)
    found = []
    for (_, dtype, layout), group in groups.items():
        values = group
        if layout != torch.strided:
            private.need("sparse gradients")
            values = [grad._values() for grad in group]
        if dtype.is_complex:
            values = [torch.view_as_real(v.conj() if v.is_conj() else v) for v in values]
        if any(map(torch.Tensor.is_neg, values)):
            values = [private.neg_view(v) if v.is_neg() else v for v in values]
        found.append(values)
    return found


def multiply_(grads: TensorList, factor: float) -> None:
    """Multiply ``grads``, floating tensors on any devices and of any dtypes, in place.

    The bits are those of ``mul_`` on dense tensors.
    """
    with torch.no_grad():
        for group in _groups(grads):
            by: Scalar = factor
            if group[0].is_cpu:
                # torch 2.13 rounds a float to the tensors' 16 bits on the CPU: 2**20 would be inf
                # in float16. 2.1 us a tensor by a float64 one, 0.6 by float32, 2.3 by a float.
                wide = torch.promote_types(group[0].dtype, torch.float32)
                by = torch.tensor(factor, dtype=wide, device="cpu")
            once = each_once(group)
            private.foreach_mul_(once, by)
            put_back(group, once)


def _torch_unscales(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's kernel takes a dtype: on CUDA not bfloat16, of which torch 2.11 says so."""
    return device.type != "cuda" or dtype != torch.bfloat16


def unscale_(grads: Sequence[torch.Tensor], scale: Scalar) -> torch.Tensor | None:
    """Divide ``grads`` by ``scale`` in place and say whether any element is not finite.

    Args:
        grads: Floating tensors without a graph on any devices, of any dtypes; sparse ones
            coalesced.
        scale: A 0-dim float32 tensor, or a float, for which nothing is checked.

    Returns:
        0-dim float32 tensor on ``scale``'s device, 1 if an element on this rank was inf or nan,
        else 0; ``None`` when ``scale`` is a float.
    """
    if not isinstance(scale, torch.Tensor):
        if scale != 1.0:
            multiply_(grads, 1.0 / scale)
        return None
    return check_and_multiply_(grads, scale.reciprocal())


@torch.no_grad()
def check_and_multiply_(grads: Sequence[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
    """Multiply ``grads`` by ``factor`` in place and say whether any element is not finite.

    Args:
        grads: As those of :func:`unscale_`.
        factor: A 0-dim float32 tensor.

    Returns:
        0-dim float32 tensor on ``factor``'s device, 1 if an element on this rank was inf or nan.
    """
    found: dict[torch.device, torch.Tensor] = {}
    for group in _groups(grads):
        device = group[0].device
        if device not in found:
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
        by, once = factor.to(device, non_blocking=True), each_once(group)
        if _torch_unscales(device, group[0].dtype):
            private.amp_foreach_non_finite_check_and_unscale_(once, found[device], by)
        else:
            scalars = ScaleScalars(by)
            run(SCALE, [once], ((0, SCALED),), scalars, flag=found[device], flags=(GIVEN,))
        put_back(group, once)
    flags = [flag.to(factor.device, non_blocking=True) for flag in found.values()]
    if len(flags) == 1:
        return flags[0]
    return torch.stack(flags).amax() if flags else torch.zeros_like(factor)
