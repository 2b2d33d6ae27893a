"""Buckets: parameters of one device and one set of dtypes, as columns for one launch.

Whole columns are looked at by functions written in C: one by one, 1,000 parameters would take
longer than SGD does. Nothing is kept from step to step, so nothing gets stale when groups or state
are edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

import torch

from apex.ops import _runtime
from apex.ops.multi_tensor import alike, local

_T = TypeVar("_T")
_DTYPE, _DEVICE = map(attrgetter, ("dtype", "device"))
_NUMEL = torch.Tensor.numel
_OWN_MEMORY = {torch.Tensor, torch.nn.Parameter}


@dataclass
class Bucket:
    """Parameters of one device and one set of dtypes, as columns.

    Attributes:
        params: The parameters, as in the group.
        grads: Their gradients; local parts of distributed ones.
        weights: What is updated: the parameters themselves or their masters.
        slots: A column for each state slot.
        extra: The storage's own column, or the 16-bit parameters behind masters.
    """

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    slots: list[list[torch.Tensor]] = field(default_factory=list)
    extra: list[torch.Tensor] | None = None


def split(
    params: Sequence[torch.Tensor],
    columns: Sequence[Sequence[torch.Tensor]],
    extra: Sequence[torch.Tensor | None] | None,
) -> Iterable[Bucket]:
    """Split parameters into buckets.

    Args:
        params: The parameters.
        columns: Gradients, weights and every slot.
        extra: What stands beside each weight, see :class:`Bucket`; ``None`` for nothing at all.
    """
    if extra is None and alike(columns):
        listed, gradients, updated, *kept = map(list, [params, *columns])
        yield Bucket(listed, gradients, updated, kept)
        return
    weights = columns[1]
    kinds = zip(
        map(_DEVICE, weights),
        *(map(_DTYPE, column) for column in columns),
        [None] * len(weights) if extra is None else [x is not None and x.dtype for x in extra],
        strict=True,
    )
    members: dict[Any, list[int]] = {}
    for number, kind in enumerate(kinds):
        members.setdefault(kind, []).append(number)
    for chosen in members.values():
        pick = _picker(chosen, len(weights))
        beside = None if extra is None else [x for x in pick(extra) if x is not None]
        listed, gradients, updated, *kept = map(pick, [params, *columns])
        yield Bucket(listed, gradients, updated, kept, beside or None)


def _picker(numbers: Sequence[int], of: int) -> Callable[[Sequence[_T]], list[_T]]:
    """Make a function that picks these of ``of`` elements."""
    if len(numbers) == of:
        return list
    return lambda column: [column[number] for number in numbers]


def check_places(
    optimizer: str,
    params: Sequence[torch.Tensor],
    columns: Sequence[Sequence[torch.Tensor]],
    extra: Sequence[torch.Tensor | None] | None,
    slots: Sequence[str],
) -> None:
    """Raise if what is stepped together is not of one size on one device.

    Kernels take addresses: they would write beyond, or into what is not theirs.

    Args:
        optimizer: Name of the class, for messages.
        params: The parameters.
        columns: Gradients, weights and every slot.
        extra: What stands beside each weight.
        slots: Names of the slots.

    Raises:
        RuntimeError: Something does not fit; the message names it.
    """
    weights = columns[1]
    names = ["gradient", "parameter", *slots, "state beside it"]
    if extra is not None:
        pairs = zip(extra, weights, strict=True)
        columns = [*columns, [weight if x is None else x for x, weight in pairs]]
    asked = (_NUMEL, torch.Tensor.get_device) if _runtime.has_accelerator() else (_NUMEL,)
    expected = [[*map(ask, weights)] for ask in asked]
    for name, column in zip(names, columns, strict=False):
        fits = all([*map(ask, column)] == e for ask, e in zip(asked, expected, strict=True))
        if fits and (not column or column[0].is_cpu == weights[0].is_cpu):
            continue
        for param, weight, other in zip(params, weights, column, strict=True):
            if (other.numel(), other.device) != (weight.numel(), weight.device):
                raise RuntimeError(
                    f"{optimizer}: the {name} of a parameter has {other.numel()} elements on "
                    f"{other.device}, and the parameter {weight.numel()} on {weight.device} (shape "
                    f"{tuple(param.shape)}). Move a model before making its optimizer; after "
                    "giving a parameter other data, clear its gradient and its entry in "
                    "optimizer.state."
                )


def local_parts(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors that hold the memory; see :func:`apex.ops.multi_tensor.local`."""
    if _OWN_MEMORY.issuperset(map(type, tensors)):
        return tensors
    return [*map(local, tensors)]
