"""Walking through containers of tensors, keeping what they are.

A container whose tensors all come through unchanged is returned as the very same object.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch

_Function = Callable[[Any], Any]


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply ``fn`` to every tensor in ``value``.

    Entered are mappings, lists, tuples (named ones too), sets, deques and dataclasses, with
    their types kept. An object that offers ``to`` (a custom batch, a packed sequence) is handed
    to ``fn`` whole. Modules, strings, arrays, iterators and everything else come back untouched.
    """
    return _walk(value, fn, ())


def _walk(value: Any, fn: _Function, path: tuple[Any, ...]) -> Any:
    """Apply ``fn`` below ``value``; ``path`` holds the containers around it."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (str, bytes, torch.nn.Module, type)) or value is None:
        return value
    if callable(getattr(value, "to", None)) and type(value).__module__.split(".")[0] != "numpy":
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


def _changed(items: Iterable[tuple[Any, Any]], fn: _Function, path: tuple[Any, ...]) -> Any:
    """What ``fn`` gives for the values of ``items``, by key, where it is another object."""
    rows = [(key, old, _walk(old, fn, path)) for key, old in items]
    return {key: new for key, old, new in rows if new is not old}


def _mapping(value: Any, fn: _Function, path: tuple[Any, ...]) -> Any:
    changed = _changed(value.items(), fn, path)
    if not changed:
        return value
    if not hasattr(value, "__setitem__"):  # a read-only view
        return dict(value) | changed
    result = copy.copy(value)
    for key, new in changed.items():
        result[key] = new
    return result


def _fields(value: Any, fn: _Function, path: tuple[Any, ...]) -> Any:
    names = [field.name for field in dataclasses.fields(value)]
    changed = _changed(((name, getattr(value, name, None)) for name in names), fn, path)
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
    if not (hasattr(value, "clear") and hasattr(value, "extend")):
        return type(value)(new)
    result = copy.copy(value)  # a subclass, which may have attributes
    result.clear()
    result.extend(new)
    return result
