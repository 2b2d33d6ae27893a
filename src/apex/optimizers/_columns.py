"""What a step reads and writes, as columns: gradients, weights, state, what is stored beside them.

Columns are collected anew at each step by functions written in C, from the groups and the state as
they are: nothing is kept, so nothing gets stale when a program edits them. Where all of a column is
uniform it carries what is known of it, see :class:`apex.ops.lists.tensor_lists.TensorColumn`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter, methodcaller
from typing import Any, NamedTuple

import torch

from apex.ops.lists.quantized import Quantized
from apex.ops.lists.tensor_lists import (
    TensorColumn,
    TensorList,
    as_uniform,
    local_parts,
    uniform_numels,
)
from apex.optimizers import _checks
from apex.optimizers import _eight_bit as eight_bit
from apex.optimizers._launches import GroupGrads, Launch, SplitArguments

_MASTERED = methodcaller("__contains__", "master_param")

Extra = Sequence[torch.Tensor | None] | None
States = Sequence[dict[str, Any]]


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


def collected(
    optimizer: Any,
    together: Sequence[list[GroupGrads]],
    active: Sequence[GroupGrads],
    gradients: Sequence[torch.Tensor],
    copies: Mapping[torch.Tensor, torch.Tensor] | None,
    *,
    makes: bool,
) -> list[SplitArguments] | None:
    """Arguments of :func:`split`, once for all joined groups that have the same slots.

    Args:
        optimizer: Whose.
        together: The joined groups.
        active: The same groups, not joined.
        gradients: Of all of them; a column where no tensor is a wrapper.
        copies: 16-bit weights that get the new values, by parameter.
        makes: Whether state that is missing is made. Else ``None`` is returned where some is
            missing or not all is uniform.
    """
    found: list[SplitArguments] = []
    kept = [optimizer._slots_of(groups[0].group) for groups in together]
    for part in parts_of(together, kept, active, gradients):
        columns = _columns(optimizer, part, copies, makes=makes)
        if columns is None or not (makes or columns[2]):
            return None
        found.append((part.params, *columns, part.sizes))
    return found


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
    if numels is not None:
        columns = [
            as_uniform(column, None if slot in optimizer.slot_shapes else numels)
            for column, slot in zip(columns, ("", "", *kept), strict=True)
        ]
        extra = extra and as_uniform(extra, numels)
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
    more = optimizer._extra_key
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
    optimizer: Any, states: Sequence[dict[str, Any]], kept: tuple[str, ...]
) -> list[list[torch.Tensor]]:
    """The slots of states as columns; ``KeyError`` if one has none."""
    if optimizer._state_form == "8bit":
        return [[*map(eight_bit.stored_as(slot), states)] for slot in kept]
    if len(kept) < 2:
        return [[*map(itemgetter(slot), states)] for slot in kept]
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
    name = optimizer._storage.column
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


def versions(optimizer: Any) -> dict[torch.Tensor, tuple[int, torch.Tensor]]:
    """By parameter, its version now, and what is stored beside it."""
    name = optimizer._extra_key
    return {
        param: (param._version, state[name])
        for param, state in optimizer.state.items()
        if isinstance(param, torch.Tensor) and name in state
    }


def follow_written(optimizer: Any) -> None:
    """Let what belongs to a weight follow if somebody else has written it since our last step."""
    name = optimizer._extra_key
    for param, (version, column) in optimizer._written.items():
        if param._version == version or optimizer.state.get(param, {}).get(name) is not column:
            continue
        _checks.written_in_capture(optimizer._name, name)
        if name != "master_param":
            column.zero_()
        elif column.shape == param.shape:
            weight = param.detach()
            column.copy_(torch.where(column.to(weight.dtype) == weight, column, weight))
        optimizer._written[param] = param._version, column
