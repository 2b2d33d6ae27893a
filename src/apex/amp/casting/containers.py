"""Walking through containers of tensors, keeping what they are.

A container whose tensors all come through unchanged is returned as the very same object.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply ``fn`` to every tensor in ``value``.

    Entered are mappings, lists, tuples (named ones too), sets, deques and dataclasses, with
    their types kept. An object that offers ``to`` (a custom batch, a packed sequence) is handed
    to ``fn`` whole. Modules, strings, arrays, iterators and everything else come back untouched.
    """
    return _walk(value, fn, ())


def _walk(value: Any, fn: Callable[[Any], Any], path: tuple[Any, ...]) -> Any:
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
    is_mapping = isinstance(value, Mapping)
    if is_mapping or dataclasses.is_dataclass(value):
        names = [] if is_mapping else [field.name for field in dataclasses.fields(value)]
        old = value.items() if is_mapping else [(n, getattr(value, n, None)) for n in names]
        rows = [(key, item, _walk(item, fn, path)) for key, item in old]
        changed = {key: new for key, item, new in rows if new is not item}
        return _with(value, changed) if changed else value
    if isinstance(value, (Sequence, Set)) or type(value).__name__ == "deque":
        return _items(value, fn, path)
    return value


def _items(value: Any, fn: Callable[[Any], Any], path: tuple[Any, ...]) -> Any:
    if isinstance(value, (range, torch.Size, memoryview, bytearray)):
        return value
    items = list(value)
    walked = [_walk(item, fn, path) for item in items]
    if all(one is other for one, other in zip(walked, items, strict=True)):
        return value
    if hasattr(value, "_fields"):  # a namedtuple takes its fields one by one
        return type(value)(*walked)
    if type(value) is list or not (hasattr(value, "clear") and hasattr(value, "extend")):
        return type(value)(walked)
    result = copy.copy(value)  # a subclass, which may have attributes
    result.clear()
    result.extend(walked)
    return result


def _with(value: Any, changed: dict[Any, Any]) -> Any:
    """A copy of a mapping or a dataclass with other values."""
    is_mapping = isinstance(value, Mapping)
    if is_mapping and not hasattr(value, "__setitem__"):  # a read-only view
        return dict(value) | changed
    result = copy.copy(value)
    for key, new in changed.items():
        if is_mapping:
            result[key] = new
        else:
            object.__setattr__(result, key, new)  # frozen ones too
    return result
