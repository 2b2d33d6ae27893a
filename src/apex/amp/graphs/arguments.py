"""Arguments and results of a captured step: their kind, and copies of them.

A graph reads the memory of its capture. So the tensors among the arguments are copied into tensors
of the graph's own, and everything else (structure, shapes, numbers, modules) is a part of the key:
calls with another key do not replay. torch's pytree walks take 8 times as long.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from typing import Any

import torch

# Arguments that are no tensors: equal ones mean the same to the function. Of the last row equal
# ones are the same object.
_CONSTANTS = (
    int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, slice, range, enum.Enum,
    torch.nn.Module, torch.optim.Optimizer, types.FunctionType, types.MethodType, type,
)  # fmt: skip


class Unfollowed(Exception):
    """A graph cannot follow this argument; the text says why."""


def _named(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """What a dict or an object of a dataclass holds, with its names."""
    if isinstance(value, MutableMapping):
        return value.items()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(one.name, getattr(value, one.name)) for one in dataclasses.fields(value)]
    return None


def key_of(value: Any, tensors: list[torch.Tensor]) -> Any:
    """What has to be equal for a replay, and the tensors that are copied.

    Raises:
        Unfollowed: It could change without this key.
    """
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if value.requires_grad:
            raise Unfollowed(
                "a tensor among the arguments requires a gradient, which a replay would write to a "
                "copy of it"
            )
        if value.layout is not torch.strided:
            raise Unfollowed(f"a tensor of layout {value.layout}")
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return kind, *[key_of(item, tensors) for item in value]
    if isinstance(value, _CONSTANTS):
        return kind, str(value) if kind in (slice, float) else value  # 0.0 == -0.0
    named = _named(value)
    if named is None:
        raise Unfollowed(
            f"an argument is a {kind.__name__}, and amp cannot find the tensors in it. Pass "
            "tensors, numbers, and tuples, lists, dicts and dataclasses of them"
        )
    return kind, *[(name, key_of(item, tensors)) for name, item in named]


def has_number(value: Any) -> bool:
    """Whether a number or a string is among the arguments: other ones are another key."""
    if isinstance(value, (tuple, list)):
        return any(map(has_number, value))
    if isinstance(value, torch.Tensor):
        return False
    named = _named(value)
    return isinstance(value, (int, str)) if named is None else any(has_number(x) for _, x in named)


def rebuilt(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], other: Callable[[Any], Any]
) -> Any:
    """``value`` with what ``change`` makes of its tensors and ``other`` of what is no container."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [rebuilt(item, change, other) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    named = _named(value)
    if named is None:
        return other(value)
    made = copy.copy(value)
    is_dict = isinstance(made, MutableMapping)
    put = made.__setitem__ if is_dict else partial(object.__setattr__, made)
    for name, item in named:
        put(name, rebuilt(item, change, other))
    return made


def copied(result: torch.Tensor) -> torch.Tensor:
    """A result as each call returns it: later steps do not change it."""
    return result.detach().clone()


def only_none(result: Any) -> None:
    """Raise ``TypeError`` for a result that is no tensor, and that all replays would repeat."""
    if result is not None:
        raise TypeError(
            f"amp.capture: the function returned {result!r} ({type(result).__name__}). Replays run "
            "no Python code, so all would return this same object. Return tensors, such as "
            "loss.detach(), or None; read numbers outside the function."
        )


def surroundings() -> tuple[Any, ...]:
    """The modes of the thread that decide what a function computes."""
    devices = ("cuda", "cpu")
    enabled = map(torch.is_autocast_enabled, devices)
    dtypes = map(torch.get_autocast_dtype, devices)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *enabled, *dtypes
