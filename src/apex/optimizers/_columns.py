"""What a step reads and writes, as columns: gradients, weights, state, what is stored beside them.

Columns are collected anew at each step by functions written in C, from the groups and the state as
they are: nothing is kept, so nothing gets stale when a program edits them. Where all of a column is
uniform it carries what is known of it, see :class:`apex.ops.lists.tensor_lists.TensorColumn`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain, count
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, NamedTuple

import torch

from apex.ops import _runtime
from apex.ops.lists.placements import placed
from apex.ops.lists.quantized import Quantized
from apex.ops.lists.storage import PLAIN, STORAGES, stores_of
from apex.ops.lists.tensor_lists import (
    OWN_MEMORY,
    TensorColumn,
    TensorList,
    local_parts,
    uniform_numels,
)
from apex.optimizers import _checks
from apex.optimizers import _eight_bit as eight_bit
from apex.optimizers._launches import GroupGrads, Launch, SplitArguments

_MASTERED, _GRAD = methodcaller("__contains__", "master_param"), attrgetter("grad")
_IS_NESTED = attrgetter("is_nested")
_PLAIN = OWN_MEMORY | {type(None)}  # a gradient may be missing

Extra = Sequence[torch.Tensor | None] | None
States = Sequence[dict[str, Any]]


def with_grads(
    group: dict[str, Any], grads: Mapping[torch.Tensor, torch.Tensor] | None
) -> GroupGrads:
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


def states_of(
    state: Mapping[Any, dict[str, Any]], params: Sequence[torch.Tensor]
) -> Sequence[dict[str, Any]] | None:
    """The states of parameters; ``None`` if one has none.

    By their ids, which is how a tensor is compared anyway: its hash is a function of Python.
    """
    if len(state) == len(params) and all(map(is_, state, params)):
        return [*state.values()]
    by_id = dict(zip(map(id, state), state.values(), strict=True))
    found: list[Any] = [*map(by_id.get, map(id, params))]
    return None if None in found else found


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
    grads: list[torch.Tensor]
    sizes: list[int]


def parts_of(
    together: Sequence[list[GroupGrads]],
    kept: Sequence[tuple[str, ...]],
    active: Sequence[GroupGrads],
    gradients: Sequence[torch.Tensor],
) -> Iterable[Part]:
    """Joined groups by their slots.

    Args:
        together: The joined groups.
        kept: The slots of each list of them.
        active: The groups, not joined.
        gradients: Of all of them; a column where no tensor is a wrapper.
    """
    plain = isinstance(gradients, TensorColumn)
    for slots in dict.fromkeys(kept):
        # Groups with other slots become empty lists: `split` yields the places in `together`.
        some = [groups if its == slots else [] for groups, its in zip(together, kept, strict=True)]
        every = [one for groups in some for one in groups]
        sizes = [sum(len(one.params) for one in each) for each in some]
        params = concatenated([one.params for one in every])
        if plain and all(map(is_, every, active)) and len(every) == len(active):
            grads: Any = gradients
        else:
            grads = concatenated([one.grads for one in every])
            grads = TensorColumn(grads) if plain else grads
        yield Part(slots, params, grads, sizes)


class Collected(NamedTuple):
    """What a step has found.

    Attributes:
        active: The groups with those of their parameters that have a gradient.
        every: All parameters.
        gradients: All gradients; a column where no tensor is a wrapper.
        together: The groups, joined where their numbers are equal.
        lists: Arguments of :func:`apex.optimizers._launches.split`, once for all joined groups that
            have the same slots; ``None`` where state is missing or not all is uniform.
    """

    active: list[GroupGrads]
    every: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    together: list[list[GroupGrads]]
    lists: list[SplitArguments] | None


def collected(
    optimizer: Any,
    kept: Sequence[tuple[str, ...]],
    noop: torch.Tensor | None,
    copies: Mapping[torch.Tensor, torch.Tensor] | None,
    active: list[GroupGrads],
) -> Collected:
    """Find gradients, weights and state of a step; nothing is made.

    Args:
        optimizer: Whose.
        kept: The slots of each group.
        noop: Whether the step is skipped, if only a device knows that.
        copies: 16-bit weights that get the new values, by parameter.
        active: The groups with the gradients of all their parameters, see :func:`with_grads`.
    """
    every = concatenated([one.params for one in active])
    gradients: Sequence[Any] = concatenated([one.grads for one in active])
    numbers = optimizer.defaults if optimizer._joins_groups else None
    types = {*map(type, chain(every, gradients))}
    if type(None) in types:
        active = [*map(without_missing, active)]
        gradients = concatenated([one.grads for one in active])
    if types <= _PLAIN:
        gradients = TensorColumn(gradients)
    else:
        name = optimizer._name
        active = [one._replace(grads=[*placed(name, one.params, one.grads)]) for one in active]
        gradients = concatenated([one.grads for one in active])
    together = joined(active, numbers, noop)
    found = Collected(active, every, gradients, together, None)
    return found._replace(lists=lists_of(optimizer, found, kept, copies, makes=False))


def are_flat(active: Sequence[GroupGrads]) -> bool:
    """Whether no gradient is missing, a wrapper or nested: torch's guards end the process on one.

    Of a parameter's own gradient torch takes care.
    """
    gradients = concatenated([one.grads for one in active])
    return OWN_MEMORY.issuperset(map(type, gradients)) and not any(map(_IS_NESTED, gradients))


class Recalled(NamedTuple):
    """What a step has found where all metadata is that of an earlier uniform step.

    Attributes:
        active: The groups with their gradients.
        together: The groups, joined where their numbers are equal.
        sizes: How many parameters each list of them has.
        every: All parameters.
        flat: Gradients, weights and slots, one column after the other.
    """

    active: list[GroupGrads]
    together: list[list[GroupGrads]]
    sizes: list[int]
    every: list[torch.Tensor]
    flat: tuple[torch.Tensor, ...]


def recalled(
    optimizer: Any,
    kept: Sequence[tuple[str, ...]],
    noop: torch.Tensor | None,
    active: list[GroupGrads],
) -> Recalled | None:
    """Find a step's lists if all metadata is that of an earlier uniform step, see `_remember`.

    Nothing else is looked at then: types and shapes are compared with those that were checked. Of
    the state all entries are found anew.
    """
    last: Uniform = optimizer._uniform
    state, slots, count = optimizer.state, last.slots, len(last.numels)
    if len(active) == 1:
        together, ((_, every, gradients),) = [active], active
    else:
        together = joined(active, optimizer.defaults if optimizer._joins_groups else None, noop)
        if not all(map(is_, chain.from_iterable(together), active)):
            return None  # joined in another order
        every = concatenated([one.params for one in active])
        gradients = concatenated([one.grads for one in active])
    if kept.count(slots) != len(kept) or not len(every) == len(state) == count:
        return None
    if not all(map(is_, state, every)) or (not slots and any(state.values())):
        return None
    states, size = state.values(), len(slots)
    try:  # a state that has more than these slots, such as a master, is left out
        kept_there = [one[slot] for slot in slots for one in states if len(one) == size]
    except KeyError:
        return None
    flat = (*gradients, *every, *kept_there)
    # The guards take a tuple as it is, of one length.
    if len(flat) != count * (2 + size) or not last.guards.check(*flat):
        return None
    addresses = tuple(map(torch.Tensor.data_ptr, flat))
    if addresses != last.together:
        last.moved(addresses)
    sizes = [count] if len(together) == 1 else [*map(_size, together)]
    return Recalled(active, together, sizes, every, flat)


def as_collected(optimizer: Any, found: Recalled) -> Collected:
    """The same with columns that carry what is known of them."""
    last, every, flat = optimizer._uniform, found.every, found.flat
    known = [TensorColumn(flat[n : n + len(every)]) for n in range(0, len(flat), len(every))]
    for column, its, slot in zip(known, last.addresses, ("", "", *last.slots), strict=True):
        column.is_uniform, column._addresses = True, its
        column.known_numels = None if slot in optimizer.slot_shapes else last.numels
    lists: Any = [(every, known, None, True, found.sizes)]
    return Collected(found.active, every, known[0], found.together, lists)


def _size(groups: Sequence[GroupGrads]) -> int:
    return sum([len(one.params) for one in groups])


class Uniform:
    """What is known of the columns of a step as long as their metadata stay the same.

    Where the tensors lie is found at each step. If it is as before, columns have the same tuples of
    addresses as before: whoever compares these needs not look into them.

    Attributes:
        slots: Of the parameters.
        guards: Of gradients, weights and slots, which hold as long as the metadata are the same.
        numels: Elements of each weight.
        how: What an elementwise update writes and how it is stored, and dtypes of the columns.
        together: All addresses of the last step.
        addresses: These by column.
        pieces: Sizes and addresses of launches, by how many parameters each has.
        numbers: What numbers of a launch came from, and these, by the number of the launch.
    """

    def __init__(
        self,
        slots: tuple[str, ...],
        columns: Sequence[TensorList],
        guards: Any,
        numels: tuple[int, ...],
    ) -> None:
        self.slots, self.guards, self.numels = slots, guards, numels
        dtypes = tuple([column[0].dtype for column in columns])
        self.how = stores_of(len(slots)), PLAIN.codec(), dtypes
        self.together: tuple[int, ...] = ()
        self.addresses: list[tuple[int, ...]] = []
        self.pieces: dict[tuple[int, ...], list[tuple[Any, Any]]] = {}
        self.numbers: dict[int, tuple[Any, Any]] = {}

    def moved(self, addresses: tuple[int, ...]) -> None:
        """Note where the tensors are now."""
        count = len(self.numels)
        self.together, self.pieces = addresses, {}
        self.addresses = [addresses[n : n + count] for n in range(0, len(addresses), count)]

    def pieces_of(self, sizes: Sequence[int]) -> list[tuple[Any, Any]]:
        """Of launches of so many parameters each, the sizes of these, and addresses by column."""
        key = tuple(sizes)
        if key not in self.pieces:
            ends = [*accumulate(sizes)]
            both = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
            self.pieces[key] = [(self.numels[x], [a[x] for a in self.addresses]) for x in both]
        return self.pieces[key]


def _remember(optimizer: Any, slots: tuple[str, ...], columns: Sequence[TensorList]) -> None:
    """Keep the guards of a uniform step without masters, copies or a storage's column.

    Args:
        optimizer: Whose.
        slots: Of the parameters.
        columns: Gradients, weights and slots: all that such a step reads and writes.
    """
    others = [*map(optimizer.slot_shapes.__contains__, slots)]
    if optimizer._state_form != "plain" or optimizer.storage != "plain" or optimizer._mastered:
        return
    if others != sorted(others):  # guards have slots shaped like the weight first
        return
    shapes = [optimizer.slot_shapes[slot] for slot in slots if slot in optimizer.slot_shapes]
    entry = vars(uniform_numels)["entry"](columns, *shapes)
    optimizer._uniform = None if entry is None else Uniform(slots, columns, *entry)


def with_own(
    found: Collected,
    copies: Mapping[int, torch.Tensor],
    numbers: Collection[str] | None,
    noop: torch.Tensor | None,
) -> Collected:
    """The same with copies of some gradients, by the number of a gradient among those of all.

    Args:
        found: What was found.
        copies: Of gradients that are not to be written into.
        numbers: As for :func:`joined`.
        noop: The same.
    """
    places = count()
    active = [
        one._replace(grads=[copies.get(next(places), grad) for grad in one.grads])
        for one in found.active
    ]
    gradients: Sequence[torch.Tensor] = concatenated([one.grads for one in active])
    if isinstance(found.gradients, TensorColumn):
        gradients = TensorColumn(gradients)
    return Collected(active, found.every, gradients, joined(active, numbers, noop), None)


def lists_of(
    optimizer: Any,
    found: Collected,
    kept: Sequence[tuple[str, ...]],
    copies: Mapping[torch.Tensor, torch.Tensor] | None,
    *,
    makes: bool,
) -> list[SplitArguments] | None:
    """The ``lists`` of a :class:`Collected`; with ``makes`` state that is missing is made."""
    lists: list[SplitArguments] = []
    slots = {id(group): its for group, its in zip(optimizer.param_groups, kept, strict=True)}
    of_lists = [slots[id(groups[0].group)] for groups in found.together]
    for part in parts_of(found.together, of_lists, found.active, found.gradients):
        columns = _columns(optimizer, part, copies, makes=makes)
        if columns is None or not (makes or columns[2]):
            return None
        lists.append((part.params, *columns, part.sizes))
    return lists


def _columns(
    optimizer: Any,
    part: Part,
    copies: Mapping[torch.Tensor, torch.Tensor] | None,
    *,
    makes: bool,
) -> tuple[list[TensorList], Sequence[torch.Tensor | None] | None, bool] | None:
    """Gradients, weights and slots; and what is stored beside the weights, or None.

    The last is whether one launch takes all of it, as
    :func:`apex.ops.lists.tensor_lists.are_uniform` says. ``None`` as in :func:`collected`.
    """
    params, kept = part.params, part.slots
    found = _states(optimizer, params, kept, makes=makes)
    if found is None:
        return None
    states, slots = found
    plain = isinstance(part.grads, TensorColumn)
    weights: TensorList = params if plain else local_parts(params)
    here = weights
    # Slots are in each state now. If all have as many entries as there are slots, none has a
    # master: 3 us for 148 parameters, where looking for masters takes 13.
    has_more = {*map(len, states)} != {len(kept)}
    mastered = has_more and any(map(_MASTERED, states))
    extra = _extras(optimizer, params, weights, states, copies, mastered=mastered)
    if mastered:
        both = zip(states, weights, strict=True)
        weights = local_parts([state.get("master_param", weight) for state, weight in both])
    columns: list[TensorList] = [part.grads, weights, *slots]
    if not plain:
        columns = [*map(local_parts, columns)]
    numels = _uniform_numels(optimizer, here, columns, extra, kept)
    optimizer._uniform = None
    if numels is not None:
        if not mastered and extra is None:
            _remember(optimizer, kept, columns)
        known = [x if isinstance(x, TensorColumn) else TensorColumn(x) for x in columns]
        for column, slot in zip(known, ("", "", *kept), strict=True):
            column.is_uniform = True
            column.known_numels = None if slot in optimizer.slot_shapes else numels
        columns = [*known]
    elif makes:
        _checks.places(optimizer, here, columns, extra, kept)
    if optimizer._state_form == "8bit":
        _checks.absmax(optimizer, params, columns[2:], kept)
    return columns, extra, numels is not None


def _states(
    optimizer: Any, params: Sequence[torch.Tensor], kept: tuple[str, ...], *, makes: bool
) -> tuple[Sequence[dict[str, Any]], list[list[torch.Tensor]]] | None:
    """The states of parameters and columns of these slots; ``None`` if some are not to be made.

    A master and the storage's column are in these states, too, where parameters get them.
    """
    more = extra_key(optimizer)
    states = states_of(optimizer.state, params)
    if states is not None and more and not all(map(methodcaller("__contains__", more), states)):
        states = None
    try:
        if states is not None:
            return states, _slot_columns(optimizer, states, kept)
    except KeyError:  # the first step of some
        pass
    if not makes:
        return None
    for param in params if optimizer._mastered else ():
        optimizer._master_or(param)
    states = optimizer._states_of(params, kept)
    return states, _slot_columns(optimizer, states, kept)


def _slot_columns(
    optimizer: Any, states: Collection[dict[str, Any]], kept: tuple[str, ...]
) -> list[list[torch.Tensor]]:
    """The slots of states as columns; ``KeyError`` if one has none."""
    if optimizer._state_form == "8bit":
        return [[*map(eight_bit.stored_as(slot), states)] for slot in kept]
    if len(kept) == 1:
        return [[*map(itemgetter(*kept), states)]]
    if not kept:
        return []
    return [*map(list, zip(*map(itemgetter(*kept), states), strict=True))] or [[] for _ in kept]


def _extras(
    optimizer: Any,
    params: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, Any]],
    copies: Mapping[torch.Tensor, torch.Tensor] | None,
    *,
    mastered: bool,
) -> Sequence[torch.Tensor | None] | None:
    """What is stored in addition to each weight; ``None`` if nothing is, for all of them."""
    name = STORAGES[optimizer.storage].column
    if name is not None:
        return local_parts([state[name] for state in states])
    if not mastered and not copies:
        return None
    copies = copies or {}
    if not mastered and len(copies) == len(params) and all(map(is_, copies, params)):
        return [*copies.values()]
    return [
        weight if "master_param" in state else copies.get(param)
        for param, weight, state in zip(params, weights, states, strict=True)
    ]


def _uniform_numels(
    optimizer: Any,
    params: Sequence[torch.Tensor],
    columns: Sequence[TensorList],
    extra: Sequence[torch.Tensor | None] | None,
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


def quantized(optimizer: Any, launch: Launch, slots: Sequence[str]) -> tuple[Quantized, ...]:
    """Which columns of a launch are quantised to 8 bits."""
    found = []
    for number, slot in enumerate(slots, 2):
        if launch.columns[number][0].dtype == torch.uint8:
            absmax = [optimizer.state[param][eight_bit.absmax_of(slot)] for param in launch.params]
            found.append(Quantized(number, eight_bit.CODES[slot], local_parts(absmax)))
    return tuple(found)


# -- weights that somebody else has written --------------------------------------------------------


def extra_key(optimizer: Any) -> str | None:
    """The key of what belongs to a weight as it was stored last."""
    column = STORAGES[optimizer.storage].column
    return column or ("master_param" if optimizer._mastered else None)


Written = list[tuple[torch.Tensor, int, torch.Tensor]]


def versions(optimizer: Any) -> Written:
    """Of each parameter its version now, and what is stored beside it."""
    name = extra_key(optimizer)
    return [
        (param, param._version, state[name])
        for param, state in optimizer.state.items()
        if isinstance(param, torch.Tensor) and name in state
    ]


def follow_written(optimizer: Any) -> None:
    """Let what belongs to a weight follow if somebody else has written it since our last step."""
    name, written = extra_key(optimizer), optimizer._written
    for number, (param, version, column) in enumerate(written):
        if param._version == version or optimizer.state.get(param, {}).get(name) is not column:
            continue
        _checks.written_in_capture(optimizer._name, name)
        if name != "master_param":
            column.zero_()
        elif column.shape == param.shape:
            weight = param.detach()
            column.copy_(torch.where(column.to(weight.dtype) == weight, column, weight))
        written[number] = param, param._version, column
