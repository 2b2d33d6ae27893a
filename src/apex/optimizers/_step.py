"""From groups to launches: what a step reads and writes, and how that is cut.

    gradients_of -> collected (joined, parts_of, columns_of) -> launches_of -> _update

Columns are collected anew at each step by functions written in C, from the groups and the state as
they are: nothing is kept from step to step, so nothing gets stale when a program edits them. One by
one, 1,000 parameters would take longer than SGD does.

Groups of equal numbers share launches: 65 groups need not be 65 launches. Where a step can be
skipped on a device, its count is a tensor there. Those of all groups are counted by one function of
torch, and their bias corrections are computed as one vector.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, repeat
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, NamedTuple

import torch

from apex._compat import private
from apex.ops import _runtime
from apex.ops.lists.dither import Dither, seed_of
from apex.ops.lists.placements import placed
from apex.ops.lists.quantized import Quantized
from apex.ops.lists.storage import AUTO, STORAGES
from apex.ops.lists.tensor_lists import (
    OWN_MEMORY,
    Scalar,
    TensorColumn,
    TensorList,
    local,
    local_parts,
    of_one_kind,
    piece,
    refuse_nested,
    uniform_numels,
)
from apex.ops.updates.adam import DeviceSteps
from apex.optimizers import _checks
from apex.optimizers import _eight_bit as eight_bit
from apex.optimizers._eight_bit import CODES
from apex.optimizers._stepped import Stepped
from apex.optimizers._written import extra_key

_DTYPE, _DEVICE, _GRAD = map(attrgetter, ("dtype", "device", "grad"))
_PARAMS, _GRADS = map(attrgetter, ("params", "grads"))
_MASTERED = methodcaller("__contains__", "master_param")
_OWN_MEMORY_OR_NONE = OWN_MEMORY | {type(None)}  # a gradient may be missing

Group = dict[str, Any]
States = Sequence[dict[str, Any]]
Extra = Sequence[torch.Tensor | None] | None
Given = Mapping[torch.Tensor, torch.Tensor] | None  # by parameter
# By the id of a step on a device: the steps there, and which of them it is.
Counters = Mapping[int, tuple[DeviceSteps, int]]


def read(factor: Scalar, noop: torch.Tensor | None) -> tuple[Scalar, torch.Tensor | None, bool]:
    """Read what is on the CPU; the last is whether the step is known to be skipped."""
    if isinstance(factor, torch.Tensor) and not _runtime.waits(factor.device):
        factor = float(factor)
    if noop is None or _runtime.waits(noop.device):
        return factor, noop, False
    return factor, None, bool(noop.item())


# -- gradients -------------------------------------------------------------------------------------


class GroupGrads(NamedTuple):
    """A group, its parameters that have a gradient, and their gradients."""

    group: dict[str, Any]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]


class Gradients(NamedTuple):
    """Parameters and gradients of a step.

    Attributes:
        active: The groups with those of their parameters that have a gradient.
        every: All parameters, also those without.
        gradients: All gradients; a column where no tensor is a wrapper.
    """

    active: list[GroupGrads]
    every: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]


def gradients_of(optimizer: Stepped, given: Given) -> Gradients:
    """Find the gradients of an optimizer; those that are ``given`` instead of ``param.grad``."""
    active: list[GroupGrads] = [*map(with_grads, optimizer.param_groups, repeat(given))]
    every = concatenated([*map(_PARAMS, active)])
    gradients: Sequence[Any] = concatenated([*map(_GRADS, active)])
    types = {*map(type, chain(every, gradients))}
    if type(None) in types:
        active = [*map(without_missing, active)]
        gradients = concatenated([*map(_GRADS, active)])
    if given is not None:  # to param.grad torch itself assigns none
        refuse_nested(f"{optimizer._name}: gradient", gradients)
    if types <= _OWN_MEMORY_OR_NONE:
        gradients = TensorColumn(gradients)
    else:
        name = optimizer._name
        active = [one._replace(grads=[*placed(name, one.params, one.grads)]) for one in active]
        gradients = concatenated([*map(_GRADS, active)])
    return Gradients(active, every, gradients)


def with_grads(group: Group, grads: Given) -> GroupGrads:
    """The group with the gradients of all its parameters; ``None`` for those that have none."""
    params = group["params"]
    found: list[Any]
    if grads is None:
        found = [*map(_GRAD, params)]
    elif len(grads) == len(params) and all(map(is_, grads, params)):
        found = [*grads.values()]
    else:
        found = [grads.get(param, param.grad) for param in params]
    return GroupGrads(group, params, found)


def without_missing(one: GroupGrads) -> GroupGrads:
    """The group with those of its parameters that have a gradient."""
    pairs = zip(one.params, one.grads, strict=True)
    params = [param for param, grad in pairs if grad is not None]
    return GroupGrads(one.group, params, [grad for grad in one.grads if grad is not None])


def with_own(found: Gradients, copies: Mapping[int, torch.Tensor]) -> Gradients:
    """The same with copies of some gradients, by the number of a gradient among those of all."""
    own = [copies.get(n, grad) for n, grad in enumerate(found.gradients)]
    rest = iter(own)
    active = [one._replace(grads=[next(rest) for _ in one.grads]) for one in found.active]
    plain = isinstance(found.gradients, TensorColumn)
    return found._replace(active=active, gradients=TensorColumn(own) if plain else own)


# -- what is stepped together ----------------------------------------------------------------------


def joined(
    active: Sequence[GroupGrads], numbers: Collection[str] | None, noop: torch.Tensor | None
) -> list[list[GroupGrads]]:
    """Join groups that have parameters and whose numbers are equal, or are the same tensors.

    Steps on a device need not be equal: kernels read one for each tensor of a list.

    Args:
        active: The groups.
        numbers: Keys of what an update reads of a group; ``None`` if it reads more than numbers.
        noop: Whether the step is skipped, if only a device knows that.
    """
    if len(active) == 1:
        return [[*active]] if active[0].group["params"] else []
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


def concatenated(lists: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    """All lists as one: the list itself if there is one."""
    return lists[0] if len(lists) == 1 else [*chain.from_iterable(lists)]


class Part(NamedTuple):
    """Parameters that have the same slots.

    Attributes:
        slots: Their slots.
        params: The parameters.
        grads: Their gradients; a column where no tensor is a wrapper.
        sizes: How many of them each list of joined groups has.
    """

    slots: tuple[str, ...]
    params: list[torch.Tensor]
    grads: Sequence[torch.Tensor]
    sizes: list[int]


def parts_of(
    optimizer: Stepped, together: Sequence[list[GroupGrads]], found: Gradients
) -> Iterable[Part]:
    """Joined groups by their slots."""
    if len(together) == 1:  # with all gradients in their order
        params = concatenated([*map(_PARAMS, together[0])])
        slots = optimizer._slots_of(together[0][0].group)
        return (Part(slots, params, found.gradients, [len(params)]),)
    kept = [optimizer._slots_of(groups[0].group) for groups in together]
    return [_part(slots, kept, together, found) for slots in dict.fromkeys(kept)]


def _part(
    slots: tuple[str, ...],
    kept: Sequence[tuple[str, ...]],
    together: Sequence[list[GroupGrads]],
    found: Gradients,
) -> Part:
    """Of joined groups, which have the slots ``kept``, those that have these."""
    # Groups with other slots become empty lists: `launches_of` yields the places in `together`.
    some = [groups if its == slots else [] for groups, its in zip(together, kept, strict=True)]
    every = [one for groups in some for one in groups]
    sizes = [sum([len(one.params) for one in each]) for each in some]
    grads: Sequence[torch.Tensor] = found.gradients
    if len(every) != len(found.active) or not all(map(is_, every, found.active)):
        grads = concatenated([*map(_GRADS, every)])
        grads = TensorColumn(grads) if isinstance(found.gradients, TensorColumn) else grads
    return Part(slots, concatenated([*map(_PARAMS, every)]), grads, sizes)


# -- columns ---------------------------------------------------------------------------------------


class Columns(NamedTuple):
    """What a part reads and writes.

    Attributes:
        params: The parameters.
        columns: Gradients, weights (the parameters or their masters) and every slot.
        extra: What is stored in addition to each weight; ``None`` for nothing at all.
        is_uniform: Whether all of it is known to have one device, and one dtype for each column.
        sizes: How many parameters each list of joined groups has, one list after the other.
    """

    params: Sequence[torch.Tensor]
    columns: Sequence[TensorList]
    extra: Extra
    is_uniform: bool
    sizes: Sequence[int]


def collected(
    optimizer: Stepped, found: Gradients, noop: torch.Tensor | None, copies: Given
) -> tuple[list[list[GroupGrads]], list[Columns]]:
    """The groups, joined where their numbers are equal, and columns of all that have same slots."""
    together = joined(found.active, optimizer.defaults if optimizer._joins_groups else None, noop)
    parts = parts_of(optimizer, together, found)
    return together, [*map(columns_of, repeat(optimizer), repeat(found), parts, repeat(copies))]


def columns_of(optimizer: Stepped, found: Gradients, part: Part, copies: Given) -> Columns:
    """Columns of a part; state that is missing is made, and what does not fit is refused.

    Of what is uniform gradients are known to be dense and real; others are looked at.

    Args:
        optimizer: Whose.
        found: What the part is of.
        part: Parameters that have the same slots.
        copies: 16-bit weights that get the new values, by parameter.
    """
    params, kept = part.params, part.slots
    known_states = _states(optimizer, params, kept)
    if known_states is None:  # all checks before anything is made
        _checks.gradients(optimizer._name, found.gradients)
        for param in params if optimizer._mastered else ():
            optimizer._master_or(param)
        made = optimizer._states_of(params, kept)
        known_states = made, _slot_columns(optimizer, made, kept)
    states, slots = known_states
    plain = isinstance(part.grads, TensorColumn)
    weights: TensorList = params if plain else local_parts(params)
    here = weights
    # Slots are in each state now. If all have as many entries as there are slots, none has a
    # master: 3 us for 148 parameters, where looking for masters takes 13.
    mastered = {*map(len, states)} != {len(kept)} and any(map(_MASTERED, states))
    extra: Extra = None
    if mastered or copies or optimizer.storage != "plain":
        extra = _extras(optimizer, params, weights, states, copies, mastered=mastered)
    if mastered:
        both = zip(states, weights, strict=True)
        weights = local_parts([state.get("master_param", weight) for state, weight in both])
    columns: list[TensorList] = [part.grads, weights, *slots]
    if not plain:
        columns = [*map(local_parts, columns)]
    if extra is None and not mastered and not optimizer.slot_shapes:
        numels = uniform_numels(columns)
    else:
        numels = _uniform_numels(optimizer, here, columns, extra, kept)
    if numels is None:
        _checks.gradients(optimizer._name, found.gradients)
        _checks.places(optimizer, here, columns, extra, kept)
    else:
        known = [x if isinstance(x, TensorColumn) else TensorColumn(x) for x in columns]
        for column, slot in zip(known, ("", "", *kept), strict=True):
            column.is_uniform = True
            column.known_numels = None if slot in optimizer.slot_shapes else numels
        columns = [*known]
    if optimizer._state_form == "8bit":
        _checks.absmax(optimizer, params, columns[2:], kept)
    return Columns(params, columns, extra, numels is not None, part.sizes)


def _states(
    optimizer: Stepped, params: Sequence[torch.Tensor], kept: tuple[str, ...]
) -> tuple[States, list[list[torch.Tensor]]] | None:
    """The states of parameters and columns of these slots; ``None`` if some are not made yet.

    A master and the storage's column are in these states, too, where parameters get them.
    """
    has_more = optimizer._mastered or optimizer.storage != "plain"
    more = extra_key(optimizer) if has_more else None
    states = states_of(optimizer.state, params)
    if states is None:
        return None
    wanting = states
    if optimizer.storage == AUTO:
        pairs = zip(params, states, strict=True)
        wanting = [state for param, state in pairs if param.dtype == torch.bfloat16]
    if more and not all(map(methodcaller("__contains__", more), wanting)):
        return None  # a generator would open a frame a tensor
    try:
        return states, _slot_columns(optimizer, states, kept)
    except KeyError:  # the first step of some
        return None


def states_of(state: Mapping[Any, dict[str, Any]], params: Sequence[torch.Tensor]) -> States | None:
    """The states of parameters; ``None`` if one has none.

    By their ids, which is how a tensor is compared anyway: its hash is a function of Python.
    """
    if len(state) == len(params) and all(map(is_, state, params)):
        return [*state.values()]
    by_id = dict(zip(map(id, state), state.values(), strict=True))
    found: list[Any] = [*map(by_id.get, map(id, params))]
    return None if None in found else found


def _slot_columns(
    optimizer: Stepped, states: States, kept: tuple[str, ...]
) -> list[list[torch.Tensor]]:
    """The slots of states as columns; ``KeyError`` if one has none."""
    look = eight_bit.stored_as if optimizer._state_form == "8bit" else itemgetter
    return [[*map(look(slot), states)] for slot in kept]


def _extras(
    optimizer: Stepped,
    params: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, Any]],
    copies: Given,
    *,
    mastered: bool,
) -> Extra:
    """What is stored in addition to each weight; ``None`` if nothing is, for all of them."""
    copies = copies or {}
    if optimizer.storage == AUTO:
        pairs = zip(params, states, strict=True)
        extra = [
            local(state["low_bits"]) if param.dtype == torch.bfloat16 else copies.get(param)
            for param, state in pairs
        ]
        return extra if any(x is not None for x in extra) else None
    name = STORAGES[optimizer.storage].column
    if name is not None:
        return local_parts([state[name] for state in states])
    if not mastered and not copies:
        return None
    if not mastered and len(copies) == len(params) and all(map(is_, copies, params)):
        return [*copies.values()]
    return [
        weight if "master_param" in state else copies.get(param)
        for param, weight, state in zip(params, weights, states, strict=True)
    ]


def _uniform_numels(
    optimizer: Stepped,
    params: Sequence[torch.Tensor],
    columns: Sequence[TensorList],
    extra: Extra,
    slots: Sequence[str],
) -> tuple[int, ...] | None:
    """Sizes of the weights if one launch takes all; arguments are those of `_checks.places`."""
    alike: list[TensorList] = [*columns[:2]]
    if columns[1] is not params:
        alike.append(params)
    others: list[TensorList] = []
    for slot, column in zip(slots, columns[2:], strict=True):
        (others if slot in optimizer.slot_shapes else alike).append(column)
    if extra is not None:
        full = [x for x in extra if x is not None]
        if len(full) < len(extra):
            return None
        alike.append(full)
    shapes = [optimizer.slot_shapes[slot] for slot in slots if slot in optimizer.slot_shapes]
    return uniform_numels([*alike, *others], *shapes)


# -- launches --------------------------------------------------------------------------------------


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


def launches_of(of: Columns) -> Iterator[tuple[int, Launch]]:
    """Split parameters into launches: the number of a list of joined groups, and one of it."""
    params, columns, extra, is_uniform, sizes = of
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
    lists = [number for number, size in enumerate(sizes) for _ in range(size)]
    kinds = zip(
        lists,
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
        yield lists[chosen[0]], Launch(listed, picked, some or None)


def quantized(optimizer: Stepped, launch: Launch, slots: Sequence[str]) -> tuple[Quantized, ...]:
    """Which columns of a launch are quantised to 8 bits."""
    found = []
    for number, slot in enumerate(slots, 2):
        if launch.columns[number][0].dtype == torch.uint8:
            absmax = [optimizer.state[param][eight_bit.absmax_of(slot)] for param in launch.params]
            found.append(Quantized(number, eight_bit.CODES[slot], local_parts(absmax)))
    return tuple(found)


def dither(launch: Launch, slots: Sequence[str], step: int | torch.Tensor) -> Dither | None:
    """The columns of a launch that are in bfloat16, and the seed of this step."""
    kinds = [(n, launch.columns[n][0].dtype) for n, slot in enumerate(slots, 2) if slot in CODES]
    columns = tuple(number for number, dtype in kinds if dtype == torch.bfloat16)
    return Dither(columns, seed_of(step, launch.device)) if columns else None


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


# -- the count of steps ----------------------------------------------------------------------------


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
        'A step of a fused optimizer was captured in a CUDA graph, and its count, "step", is '
        f"{where}, so each replay would repeat the bias corrections of the captured step. Use "
        "FusedAdam(capturable=True) or FusedMixedPrecisionLamb, which count on the device. Other "
        "optimizers do so under a dynamic loss scale; make a step before capturing "
        "(docs/optimizers.md, CUDA graphs)."
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
        place_of = {id(param): place for one, place in pairs for param in one.params}
        by_place = groupby(place_of[id(param)] for param in launch.params)
        runs = [(place, len([*some])) for place, some in by_place]
    return {**numbers, "step": counts.of(runs, launch.device)}
