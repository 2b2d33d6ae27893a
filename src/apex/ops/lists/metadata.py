"""What is known of lists of tensors by their metadata, remembered until that changes.

Before a launch its lists are looked at: devices, dtypes, shapes, strides, the negative bit. From
step to step all of this stays the same, and in Python each look costs 50 to 150 ns a tensor, 1 to
2 us together. torch compares the metadata of a list with what it was in one call, 100 ns a tensor:
``TensorGuards``, by which ``torch.compile`` knows whether its code still applies. It compares type,
dispatch keys (device, layout, negative and conjugate bit), dtype, device number, sizes, strides and
``requires_grad`` of each tensor with those of an earlier one. It keeps no tensor, so it does not
matter whether the tensors are the same.

Where a tensor lies is no metadata: see :mod:`apex.ops.lists.pointer_tables`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, TypeVar, cast

import torch

from apex._compat import private
from apex.ops import _runtime

_Fact = TypeVar("_Fact", bound=Callable[..., Any])
Entry = tuple[Any, Any]  # guards, and what is known where they hold

_PLAIN, _LAYOUT = frozenset(_runtime.PLAIN), attrgetter("layout")

_Guards = private.TensorGuards  # or None: lists are looked at each time


# Tensors of which guards are kept, of 180 bytes each: 90 MB. FusedAdam's lists have 4 a parameter.
LIMIT = 2**19
_guarded = [0]  # since guards were thrown away


@functools.lru_cache(maxsize=256)
def _kept(*key: Hashable) -> list[Any]:
    """Where guards of such lists are put, and what is known if they hold."""
    return []


def of_metadata(fact: _Fact) -> _Fact:
    """Have a function of columns computed only where their metadata is not that of an earlier call.

    What it returns depends on nothing but the metadata and its other arguments, which are hashable,
    and is shared by all calls. The function gets an attribute ``entry``: the same, but returns the
    guards and what is known if ``guards.check(*tensors)`` holds, or ``None``; for a caller that
    keeps them.
    """

    def entry_of(columns: Sequence[Sequence[torch.Tensor]], *more: Hashable) -> Entry | None:
        # Guards never hold for a tensor that is given twice: only its first column is compared, and
        # which columns repeat it is in the key.
        repeats = _repeats(columns)
        distinct = [x for n, x in enumerate(columns) if n not in repeats] if repeats else columns
        full = [column for column in distinct if column]
        ends = full and (full[0][0], full[-1][-1])
        middle = full and full[len(full) // 2]
        some = middle and (*ends, middle[len(middle) // 2])
        if not some or torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, some)):
            return None
        # Equal keys need not mean equal metadata: they choose with what it is compared.
        chosen = [(x.dtype, x.numel(), x.is_nested) for x in some]  # torch aborts on a nested one
        kept = _kept(fact, more, *repeats.items(), *map(len, columns), *chosen)
        for entry in kept:
            if entry[0].check(*chain.from_iterable(distinct)):
                return cast("Entry", entry)
        tensors = [*chain.from_iterable(distinct)]
        if not _can_be_guarded(tensors):
            return None
        entry = _guards(tensors), fact(columns, *more)
        _make_room(len(tensors))
        # Four lists for a key, the newest first: gradients have the key of their parameters.
        kept[:] = [entry, *kept[:3]]
        return entry

    @functools.wraps(fact)
    def known(columns: Sequence[Sequence[torch.Tensor]], *more: Hashable) -> Any:
        entry = entry_of(columns, *more)
        return fact(columns, *more) if entry is None else entry[1]

    vars(known)["entry"] = entry_of
    return cast("_Fact", known)


def _make_room(count: int) -> None:
    """Throw all guards away when there are too many: of lists that change from call to call."""
    _guarded[0] += count
    if _guarded[0] > LIMIT:
        _kept.cache_clear()
        _guarded[0] = count


def _repeats(columns: Sequence[Sequence[torch.Tensor]]) -> dict[int, int]:
    """Numbers of columns that have the tensors of an earlier one, as in place, and of that."""
    heads = [id(column[0]) if column else 0 for column in columns]
    if len({*heads}) == len(heads):
        return {}
    pairs = enumerate(map(heads.index, heads))
    return {n: first for n, first in pairs if n > first and _are_same(columns[n], columns[first])}


def _are_same(column: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(column) == len(other) and all(map(is_, column, other))


def _can_be_guarded(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether guards of these tensors can be made, and can hold: they never do for one twice."""
    return (
        _Guards is not None
        and len({*map(id, tensors)}) == len(tensors)
        and _PLAIN.issuperset(map(type, tensors))
        and {*map(_LAYOUT, tensors)} == {torch.strided}
    )


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    return _Guards(
        *tensors,
        dynamic_dims_sizes=[[*x.shape] for x in tensors],
        dynamic_dims_strides=[[*x.stride()] for x in tensors],
    )
