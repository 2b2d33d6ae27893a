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
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeVar, cast

import torch

from apex._compat import private
from apex.ops import _runtime

_Fact = TypeVar("_Fact", bound=Callable[..., Any])

_TENSOR_TYPES, _FIRST = frozenset(_runtime.TENSOR_TYPES), itemgetter(0)
_DTYPE, _LAYOUT, _IS_NESTED = map(attrgetter, ("dtype", "layout", "is_nested"))

_compiler = private.compiler
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
    and is shared by all calls.
    """

    @functools.wraps(fact)
    def known(columns: Sequence[Sequence[torch.Tensor]], *more: Hashable) -> Any:
        # Guards never hold for a tensor that is given twice: only its first column is compared, and
        # which columns repeat it is in the key.
        full, distinct = [*filter(None, columns)], columns
        repeats: dict[int, int] = {}  # dict[int, int]() takes 0.7 us
        if len({*map(id, map(_FIRST, full))}) != len(full):
            repeats = _repeats(columns)
            distinct = [x for n, x in enumerate(columns) if n not in repeats]
            full = [*filter(None, distinct)]
        ends = full and (full[0][0], full[-1][-1])
        middle = full and full[len(full) // 2]
        some = middle and (*ends, middle[len(middle) // 2])
        compiles = _compiler.is_dynamo_compiling() or _compiler._is_compiling_flag
        if not some or compiles or not _TENSOR_TYPES.issuperset(map(type, some)):
            return fact(columns, *more)
        # The last lists of these lengths first, as most are: to look for others takes 1.5 us more.
        lengths, nested = (*map(len, columns),), (*map(_IS_NESTED, some),)
        last = _kept(fact, more, lengths, nested)
        if last and not repeats and last[0][0].check(*chain.from_iterable(columns)):
            return last[0][1]
        # Equal keys need not mean equal metadata: they choose with what it is compared.
        chosen = *map(_DTYPE, some), *map(torch.Tensor.numel, some)
        # A nested one is told apart: torch aborts where guards see it.
        kept = _kept(fact, more, *repeats.items(), *lengths, *chosen, *nested)
        for guards, found in kept:
            if guards.check(*chain.from_iterable(distinct)):
                last[:] = [] if repeats else [(guards, found)]
                return found
        tensors, found = [*chain.from_iterable(distinct)], fact(columns, *more)
        if _can_be_guarded(tensors):
            guards = _guards(tensors)
            _make_room(len(tensors))
            # Four lists for a key, the newest first: gradients have the key of their parameters.
            kept[:] = [(guards, found), *kept[:3]]
        return found

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
    pairs = enumerate(map(heads.index, heads))
    return {n: first for n, first in pairs if n > first and _are_same(columns[n], columns[first])}


def _are_same(column: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(column) == len(other) and all(map(is_, column, other))


def _can_be_guarded(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether guards of these tensors can be made, and can hold: they never do for one twice."""
    return (
        _Guards is not None
        and len({*map(id, tensors)}) == len(tensors)
        and _TENSOR_TYPES.issuperset(map(type, tensors))
        and {*map(_LAYOUT, tensors)} == {torch.strided}
    )


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    return _Guards(
        *tensors,
        dynamic_dims_sizes=[[*x.shape] for x in tensors],
        dynamic_dims_strides=[[*x.stride()] for x in tensors],
    )
