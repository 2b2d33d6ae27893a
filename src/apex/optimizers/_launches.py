"""Groups that are stepped together, the count of their steps, and what one launch steps of them.

Groups of equal numbers share launches: 65 groups need not be 65 launches.
Where a step can be skipped on a device, its count is a tensor there. Those of all groups are
counted by one function of torch, and their bias corrections are computed as one vector.

Whole columns are looked at by functions written in C: one by one, 1,000 parameters would take
longer than SGD does. Nothing is kept from step to step, so nothing gets stale when groups or state
are edited.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from apex._compat import private
from apex.ops import _runtime
from apex.ops.lists.tensor_lists import Scalar, of_one_kind, piece
from apex.ops.updates.adam import DeviceSteps

_DTYPE, _DEVICE = map(attrgetter, ("dtype", "device"))

# Of `split`.
SplitArguments = tuple[
    Sequence[torch.Tensor],
    Sequence[Sequence[torch.Tensor]],
    Sequence[torch.Tensor | None] | None,
    bool,
    Sequence[int],
]
# By the id of a step on a device: the steps there, and which of them it is.
Counters = Mapping[int, tuple[DeviceSteps, int]]


class GroupGrads(NamedTuple):
    """A group, its parameters that have a gradient, and their gradients."""

    group: dict[str, Any]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]


def count_steps(
    groups: Iterable[dict[str, Any]],
    noop: torch.Tensor | None,
    elsewhere: torch.device | None = None,
) -> Counters:
    """Count the step of every group that has parameters, here or on other ranks.

    It is a number, or a tensor where the step may be skipped on a device. A tensor that several
    groups share counts once.

    Args:
        groups: The groups.
        noop: Whether the step is skipped, if only a device knows that.
        elsewhere: The device of parameters that other ranks have, if some do.

    Raises:
        RuntimeError: A CUDA graph is being captured, and a count is not on the device.
    """
    captured = _runtime.capturing()
    on: dict[torch.device, dict[int, torch.Tensor]] = {}
    for group in groups:
        if not group["params"] and elsewhere is None:
            continue
        step = group.get("step", 0)
        device = group["params"][0].device if group["params"] else elsewhere
        assert device is not None
        if captured:
            check_captured(step, device)
        if noop is None and not isinstance(step, torch.Tensor):
            group["step"] = step + 1
            continue
        if not isinstance(step, torch.Tensor):
            step = torch.full((1,), step, dtype=torch.int32, device=device)
        group["step"] = step = step.to(device, non_blocking=True)
        on.setdefault(device, {})[id(step)] = step
    counters: dict[int, tuple[DeviceSteps, int]] = {}
    for device, by_id in on.items():
        steps = [*by_id.values()]
        if noop is None:
            private.foreach_add_(steps, 1)
        else:
            taken = (noop.to(device, non_blocking=True) == 0).to(torch.int32)
            private.foreach_add_(steps, [taken.view_as(step) for step in steps])
        if _runtime.waits(device):
            counts = DeviceSteps(torch.cat([step.view(1) for step in steps]).double())
            counters |= {number: (counts, place) for place, number in enumerate(by_id)}
    return counters


def check_captured(step: int | torch.Tensor, device: torch.device) -> None:
    """Raise ``RuntimeError`` if replays of a CUDA graph could not count on from ``step``."""
    if isinstance(step, torch.Tensor) and step.device == device:
        return
    where = f"on {step.device}" if isinstance(step, torch.Tensor) else f"the Python number {step}"
    raise RuntimeError(
        f'A step of a fused optimizer was captured in a CUDA graph, and its count, "step", is '
        f"{where}: each replay would keep the bias corrections of the step captured. Use "
        "FusedAdam(capturable=True) or FusedMixedPrecisionLamb, which count on the device. Others "
        "do so under a dynamic loss scale; take a step before capturing (docs/optimizers.md, CUDA "
        "graphs)."
    )


def counted(groups: Sequence[GroupGrads], launch: Launch, counters: Counters) -> dict[str, Any]:
    """The numbers of joined groups for a launch, with the step as updates take it."""
    numbers = groups[0].group
    step = numbers.get("step")
    if not isinstance(step, torch.Tensor):
        return numbers
    if not _runtime.waits(step.device):
        return {**numbers, "step": int(step)}
    # Joined groups may have steps of their own: kernels are given a bias correction for each
    # tensor, made of `runs`: which of the steps, and for how many tensors in a row.
    counts = counters[id(step)][0]
    places = [counters[id(one.group["step"])][1] for one in groups]
    runs = [(places[0], len(launch.params))]
    if len({*places}) > 1:  # a launch may have fewer tensors than its groups, in their order
        pairs = zip(groups, places, strict=True)
        owners = {id(param): place for one, place in pairs for param in one.params}
        by_owner = groupby(owners[id(param)] for param in launch.params)
        runs = [(place, len([*some])) for place, some in by_owner]
    return {**numbers, "step": counts.of(runs, launch.device)}


class Launch(NamedTuple):
    """What one launch steps: parameters of one device and one set of dtypes.

    Attributes:
        params: The parameters, as in the group.
        columns: Gradients (local parts of distributed ones), weights (the parameters or their
            masters), and every state slot.
        extra: The storage's own column, or the 16-bit parameters behind masters.
    """

    params: list[torch.Tensor]
    columns: list[list[torch.Tensor]]
    extra: list[torch.Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.columns[1][0].device


def split(
    params: Sequence[torch.Tensor],
    columns: Sequence[Sequence[torch.Tensor]],
    extra: Sequence[torch.Tensor | None] | None,
    is_uniform: bool,
    sizes: Sequence[int],
) -> Iterable[tuple[int, Launch]]:
    """Split parameters into launches.

    Args:
        params: The parameters.
        columns: Gradients, weights and every slot.
        extra: What is stored in addition to each weight; ``None`` for nothing at all.
        is_uniform: Whether all of it is known to have one device, and one dtype for each column.
        sizes: How many parameters each list of joined groups has, one list after the other.

    Yields:
        The number of the list of groups, and a launch of it.
    """
    if is_uniform or (extra is None and of_one_kind(columns)):
        start = 0
        for number, size in enumerate(sizes):
            if size == len(params):
                whole: Any = params, columns, extra
                yield number, Launch(*whole)
                return
            first, start = start, start + size
            if size:
                some: Any = None if extra is None else piece(extra, first, start)
                own = [piece(column, first, start) for column in columns]
                yield number, Launch(piece(params, first, start), own, some)
        return
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    kinds = zip(
        owners,
        map(_DEVICE, columns[1]),
        *(map(_DTYPE, column) for column in columns),
        [None] * len(params) if extra is None else [x is not None and x.dtype for x in extra],
        strict=True,
    )
    members: dict[Any, list[int]] = {}
    for number, kind in enumerate(kinds):
        members.setdefault(kind, []).append(number)
    for chosen in members.values():
        listed, *picked = [[column[n] for n in chosen] for column in (params, *columns)]
        some = [] if extra is None else [x for n in chosen if (x := extra[n]) is not None]
        yield owners[chosen[0]], Launch(listed, picked, some or None)


def scalar(value: Any, device: torch.device) -> Scalar:
    """A group's number for a kernel: a Python number, or a float32 tensor on ``device``.

    What is on the host is read there: of float32 the shortest number that it can stand for, 0.001
    and not 0.0010000000475. torch's CPU kernels compute with float64 numbers, and a learning rate
    in a tensor (``capturable``) has to step as the same one without.
    """
    if not isinstance(value, torch.Tensor):
        return float(value)
    if _runtime.waits(value.device):
        return value.to(device, torch.float32, non_blocking=True).reshape(())
    exact: float = value.item()
    if value.dtype == torch.float32:
        for digits in (6, 7, 8):
            short = float(f"{exact:.{digits}g}")
            if struct.unpack("f", struct.pack("f", short))[0] == exact:
                return short
    return exact
