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
from typing import Any, TypeVar, cast

import torch

from apex.ops import _runtime

_Fact = TypeVar("_Fact", bound=Callable[..., Any])

# A private class, in torch 2.9 and in 2.13; without it lists are looked at each time.
_Guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)


@functools.lru_cache(maxsize=256)  # 180 bytes a tensor
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
        tensors = [*chain.from_iterable(columns)]
        if not tensors or torch.compiler.is_compiling():
            return fact(columns, *more)
        # Equal keys need not mean equal metadata: they choose with what it is compared.
        some = [tensors[0], tensors[len(tensors) // 2], tensors[-1]]
        kept = _kept(fact, more, *map(len, columns), *[(x.dtype, x.numel()) for x in some])
        for guards, found in kept:
            if guards.check(*tensors):
                return found
        found = fact(columns, *more)
        if _Guards is not None and {*_runtime.PLAIN}.issuperset(map(type, tensors)):
            kept[:] = [(_guards(tensors), found), *kept[:3]]  # such as parameters and gradients
        return found

    return cast("_Fact", known)


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    return _Guards(
        *tensors,
        dynamic_dims_sizes=[[*x.shape] for x in tensors],
        dynamic_dims_strides=[[*x.stride()] for x in tensors],
    )
