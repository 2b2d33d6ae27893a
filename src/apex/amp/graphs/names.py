"""Names by which a captured function reaches tensors that it reads: another one there is seen.

A graph reads memory. A program that puts another tensor in the place of one (``mask = masks[i]``)
while something else still holds the old one would go on with the old one, in silence. So the names
in the code of the function, and of functions of Python that it calls by name, are looked up as
Python would: globals, variables around it, ``self``, and one step further the attributes, or keys,
of what is found there. What is reached otherwise (an element of a list) is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

DEPTH = 4  # of functions that call each other


def rows(
    function: Any,
    modules: Iterable[torch.nn.Module],
    is_read: Callable[[torch.Tensor], bool],
    said: str,
) -> list[tuple[Callable[[Any], Any], Sequence[Any], Sequence[str]]]:
    """What to look at before each replay: what reads a value, its keys, and the words for each.

    Args:
        function: That is captured.
        modules: Whose attributes are looked at, too.
        is_read: Whether the function reads a tensor, and neither amp nor a module holds it.
        said: The words.
    """
    found: dict[tuple[int, Any], tuple[Callable[[Any], Any], Any]] = {}

    def look(table: Any, read: Callable[[Any], Any], keys: Iterable[Any]) -> Iterator[Any]:
        for key in keys:
            value = read(key)
            if isinstance(value, torch.Tensor):
                if is_read(value):
                    found[id(table), key if isinstance(key, str) else id(key)] = read, key
            elif value is not None:
                yield value

    for module in modules:
        [*look(module, vars(module).get, [*vars(module)])]
    todo, seen = [(function, 0)], set[int]()
    for one, depth in todo:  # which grows
        own, owner = _unwrapped(one)
        if own is None or id(own) in seen or depth > DEPTH:
            continue
        seen.add(id(own))
        names = list(_names(own.__code__))
        values = [*look(own.__globals__, own.__globals__.get, names)]
        values += look(own, _content, own.__closure__ or ())
        values += [] if owner is None else [owner]
        for value in values:
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                todo.append((value, depth + 1))
            elif isinstance(value, dict):
                [*look(value, value.get, names)]
            elif not isinstance(value, (torch.nn.Module, type)) and hasattr(value, "__dict__"):
                inner = look(value, vars(value).get, names)
                todo += [(x, depth + 1) for x in inner if isinstance(x, FunctionType)]
    return [(read, [key], [said]) for read, key in found.values()]


def _unwrapped(function: Any) -> tuple[FunctionType | None, Any]:
    """The function of Python that runs, and what it is a method of."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, MethodType):
        return _unwrapped(function.__func__)[0], function.__self__
    if isinstance(function, FunctionType):
        return function, None
    call = getattr(type(function), "__call__", None)  # noqa: B004  # of the class, as Python does
    return (call, function) if isinstance(call, FunctionType) else (None, None)


def _names(code: CodeType) -> Iterator[str]:
    """Names, and strings that may be keys, in a function and in those that are defined in it."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, str):
            yield one
        elif isinstance(one, CodeType):
            yield from _names(one)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet, or deleted
        return None
