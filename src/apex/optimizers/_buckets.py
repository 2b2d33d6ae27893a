"""Buckets: parameters of one device and one set of dtypes, as columns for one launch.

Whole columns are looked at by functions written in C: one by one, 1,000 parameters would take
longer than SGD does. Nothing is kept from step to step, so nothing gets stale when groups or state
are edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch

from apex.ops import _runtime
from apex.ops.lists.columns import of_one_kind

_T = TypeVar("_T")
_DTYPE, _DEVICE, _SHAPE = map(attrgetter, ("dtype", "device", "shape"))
_GET_DEVICE = torch.Tensor.get_device


class Bucket(NamedTuple):
    """Parameters of one device and one set of dtypes, as columns.

    Attributes:
        params: The parameters, as in the group.
        grads: Their gradients; local parts of distributed ones.
        weights: What is updated: the parameters themselves or their masters.
        slots: A column for each state slot.
        extra: The storage's own column, or the 16-bit parameters behind masters.
    """

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    weights: list[torch.Tensor]
    slots: list[list[torch.Tensor]]
    extra: list[torch.Tensor] | None = None


def split(
    params: Sequence[torch.Tensor],
    columns: Sequence[Sequence[torch.Tensor]],
    extra: Sequence[torch.Tensor | None] | None,
    sizes: Sequence[int],
) -> Iterable[tuple[int, Bucket]]:
    """Split parameters into buckets.

    Args:
        params: The parameters.
        columns: Gradients, weights and every slot.
        extra: What is stored beside each weight, see :class:`Bucket`; ``None`` for nothing at all.
        sizes: How many parameters each list of joined groups has, one list after the other. Those
            of a bucket are of one list.

    Yields:
        The number of the list, and a bucket.
    """
    if extra is None and of_one_kind(columns):
        start = 0
        for number, size in enumerate(sizes):
            part = slice(start, start := start + size)
            if size:
                listed, gradients, updated, *kept = [list(x[part]) for x in (params, *columns)]
                yield number, Bucket(listed, gradients, updated, kept)
        return
    weights = columns[1]
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    kinds = zip(
        owners,
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
        yield owners[chosen[0]], Bucket(listed, gradients, updated, kept, beside or None)


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
    slots: Mapping[str, Callable[[torch.Tensor], Sequence[int]] | None],
) -> None:
    """Raise if what is stepped together does not fit, or is on different devices.

    Kernels take addresses: they would write beyond, or into what is not theirs. The number of
    elements is not enough: after ``param.data = param.data.t().contiguous()`` an element would meet
    another one's gradient and state.

    Args:
        optimizer: Name of the class, for messages.
        params: The parameters; local parts of distributed ones.
        columns: Gradients, weights and every slot.
        extra: What is stored beside each weight.
        slots: Names of the slots, and what tells the shape from the parameter; ``None`` where it is
            the parameter's.

    Raises:
        RuntimeError: Something does not fit; the message names it.
    """
    shapes = [*map(_SHAPE, params)]
    devices = [*map(_GET_DEVICE, params)] if _runtime.has_accelerator() else []

    def check(name: str, column: Sequence[torch.Tensor], wanted: Sequence[torch.Size]) -> None:
        fits = [*map(_SHAPE, column)] == wanted
        is_near = not column or column[0].device == params[0].device
        if not (fits and is_near) or (devices and [*map(_GET_DEVICE, column)] != devices):
            _refuse(optimizer, name, params, column, wanted)

    grads, weights, *kept = columns
    check("gradient", grads, shapes)
    if weights is not params:
        check("master", weights, shapes)
    for (name, shape_of), column in zip(slots.items(), kept, strict=True):
        wanted = [torch.Size(shape_of(param)) for param in params] if shape_of else shapes
        check(name, column, wanted)
    if extra is not None:
        beside = [param if x is None else x for x, param in zip(extra, params, strict=True)]
        check("state beside it", beside, shapes)


def _refuse(
    optimizer: str,
    name: str,
    params: Sequence[torch.Tensor],
    column: Sequence[torch.Tensor],
    shapes: Sequence[torch.Size],
) -> None:
    """Raise for the first parameter that something does not fit."""
    for param, tensor, shape in zip(params, column, shapes, strict=True):
        if tensor.device == param.device and tensor.shape == shape:
            continue
        raise RuntimeError(
            f"{optimizer}: the {name} of a parameter has shape {tuple(tensor.shape)} on "
            f"{tensor.device}, and for this parameter it would be {tuple(shape)} on "
            f"{param.device}. Move a model before making its optimizer; after giving a parameter "
            "other data, clear its gradient and its entry in optimizer.state."
        )
