"""Walking through containers of tensors, keeping what they are.

A container whose tensors all come through unchanged is returned as the very same object.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

_Function = Callable[[Any], Any]


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply ``fn`` to every tensor in ``value``.

    Entered are mappings, lists, tuples (named ones too), sets, deques and dataclasses, with
    their types kept. An object that offers ``to`` (a custom batch, a packed sequence) is handed
    to ``fn`` whole. Modules, strings, arrays, iterators and everything else come back untouched.

    Args:
        value: Anything.
        fn: Called with a tensor or an object that has ``to``; returns what replaces it.
    """
    return _walk(value, fn, ())


def _walk(value: Any, fn: _Function, path: tuple[Any, ...]) -> Any:
    """Apply ``fn`` below ``value``; ``path`` holds the containers around it."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (str, bytes, torch.nn.Module, type)) or value is None:
        return value
    if callable(getattr(value, "to", None)) and not _is_array(value):
        return fn(value)
    if any(value is outer for outer in path):  # a container that holds itself
        return value
    path = (*path, value)
    if isinstance(value, Mapping):
        return _mapping(value, fn, path)
    if dataclasses.is_dataclass(value):
        return _fields(value, fn, path)
    if isinstance(value, (Sequence, Set)) or type(value).__name__ == "deque":
        return _items(value, fn, path)
    return value


def _is_array(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "numpy"


def _mapping(value: Any, fn: _Function, path: tuple[Any, ...]) -> Any:
    changed = {}
    for key, old in value.items():
        new = _walk(old, fn, path)
        if new is not old:
            changed[key] = new
    if not changed:
        return value
    if not hasattr(value, "__setitem__"):  # a read-only view
        return dict(value) | changed
    result = copy.copy(value)
    for key, new in changed.items():
        result[key] = new
    return result


def _fields(value: Any, fn: _Function, path: tuple[Any, ...]) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        new = _walk(old, fn, path)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(result, name, new)  # frozen ones too
    return result


def _items(value: Any, fn: _Function, path: tuple[Any, ...]) -> Any:
    if isinstance(value, (range, torch.Size, memoryview, bytearray)):
        return value
    old = list(value)
    new = [_walk(item, fn, path) for item in old]
    if all(one is other for one, other in zip(new, old, strict=True)):
        return value
    if hasattr(value, "_fields"):  # a namedtuple takes its fields one by one
        return type(value)(*new)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(new)
    return _rebuilt(value, new)


def _rebuilt(value: Any, new: list[Any]) -> Any:
    """A subclass: keep its attributes where it can be filled again, else call its type."""
    result = copy.copy(value)
    if hasattr(result, "clear") and hasattr(result, "extend"):
        result.clear()
        result.extend(new)
        return result
    return type(value)(new)
