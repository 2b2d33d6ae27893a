"""Groups that are stepped together, the count of their steps, and buckets for one launch each.

Groups of equal numbers share buckets, and with them launches: 65 groups need not be 65 launches.
Where a step can be skipped on a device, its count is a tensor there. Those of all groups are
counted by one function of torch, and their bias corrections are computed as one vector.

Whole columns are looked at by functions written in C: one by one, 1,000 parameters would take
longer than SGD does. Nothing is kept from step to step, so nothing gets stale when groups or state
are edited.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch

from apex.ops import _runtime
from apex.ops.lists.columns import of_one_kind
from apex.ops.updates.adam import StepCounts

_T = TypeVar("_T")
_DTYPE, _DEVICE = map(attrgetter, ("dtype", "device"))

# By the id of a step on a device: the steps there, and which of them it is.
Counters = Mapping[int, tuple[StepCounts, int]]


class GroupGrads(NamedTuple):
    """A group, its parameters that have a gradient, and their gradients."""

    group: dict[str, Any]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]


def joined(
    active: Iterable[GroupGrads], numbers: Collection[str] | None, noop: torch.Tensor | None
) -> list[list[GroupGrads]]:
    """Join groups whose numbers are equal, or are the same tensors.

    Steps on a device need not be equal: kernels read one for each tensor of a list.

    Args:
        active: The groups; those without parameters are left out.
        numbers: Keys of what an update reads of a group, besides its step; ``None`` if it reads
            more than numbers, so that none are joined.
        noop: Whether the step is skipped, if only a device knows that.
    """
    found: dict[Any, list[GroupGrads]] = {}
    for one in active:
        group = one.group
        if not group["params"]:
            continue
        key: Any = id(group)
        if numbers is not None:
            device, step = group["params"][0].device, group.get("step", 0)
            if noop is not None or isinstance(step, torch.Tensor):
                step = None if _runtime.waits(device) else int(step)
            key = device, step, *map(_hashable, map(group.get, numbers))
        found.setdefault(key, []).append(one)
    return [*found.values()]


def _hashable(number: Any) -> Any:
    """A number to compare by; a tensor is equal to itself only."""
    if type(number).__hash__ is not None:
        return number
    return tuple(map(float, number)) if isinstance(number, list) else id(number)


def count_steps(groups: Iterable[dict[str, Any]], noop: torch.Tensor | None) -> Counters:
    """Count the step of every group that has parameters.

    It is a number, or a tensor where the step may be skipped on a device. A tensor that several
    groups share counts once.
    """
    on: dict[torch.device, dict[int, torch.Tensor]] = {}
    for group in groups:
        if not group["params"]:
            continue
        step = group.get("step", 0)
        if noop is None and not isinstance(step, torch.Tensor):
            group["step"] = step + 1
            continue
        device = group["params"][0].device
        if not isinstance(step, torch.Tensor):
            step = torch.full((1,), step, dtype=torch.int32, device=device)
        group["step"] = step = step.to(device, non_blocking=True)
        on.setdefault(device, {})[id(step)] = step
    counters: dict[int, tuple[StepCounts, int]] = {}
    for device, by_id in on.items():
        steps = [*by_id.values()]
        if noop is None:
            torch._foreach_add_(steps, 1)
        else:
            taken = (noop.to(device, non_blocking=True) == 0).to(torch.int32)
            torch._foreach_add_(steps, [taken.view_as(step) for step in steps])
        if _runtime.waits(device):
            counts = StepCounts(torch.cat([step.view(1) for step in steps]).double())
            counters |= {number: (counts, place) for place, number in enumerate(by_id)}
    return counters


def counted(
    groups: Sequence[GroupGrads],
    params: Sequence[torch.Tensor],
    device: torch.device,
    counters: Counters,
) -> dict[str, Any]:
    """The numbers of joined groups, with the step as updates take it.

    Args:
        groups: The groups.
        params: Those of their parameters that are in one bucket.
        device: Where these are.
        counters: What :func:`count_steps` returned.
    """
    numbers = groups[0].group
    step = numbers.get("step")
    if not isinstance(step, torch.Tensor):
        return numbers
    if not _runtime.waits(step.device):
        return {**numbers, "step": int(step)}
    counts = counters[id(step)][0]
    places = [counters[id(one.group["step"])][1] for one in groups]
    runs = [(places[0], len(params))]
    if len({*places}) > 1:
        pairs = zip(groups, places, strict=True)
        owners = {id(param): place for one, place in pairs for param in one.params}
        by_owner = groupby(owners[id(param)] for param in params)
        runs = [(place, len([*some])) for place, some in by_owner]
    return {**numbers, "step": counts.of(runs, device)}


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
