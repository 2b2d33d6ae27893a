"""Names by which a captured function reaches the tensors that it reads: rebinding one is noticed.

A graph reads memory. If a program rebinds a name (``mask = masks[i]``) while something else still
holds the old tensor, replays would go on with the old one, in silence. So the names in the code of
the function, and of functions of Python that it calls by name, are looked up as Python would:
globals, variables around it, ``self``, and one step further the attributes, or keys, of what is
found there. What is reached otherwise (an element of a list) is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

DEPTH = 4  # of functions that call each other


Row = tuple[Callable[[Any], Any], Sequence[Any], Sequence[str]]


def rows(
    function: Any,
    modules: Iterable[torch.nn.Module],
    is_read: Callable[[torch.Tensor], bool],
    said: str,
) -> list[Row]:
    """What to look at before each replay: what reads a value, its keys, and the words for each.

    Args:
        function: That is captured.
        modules: Whose attributes are looked at, too.
        is_read: Whether the function reads a tensor, and neither amp nor a module holds it.
        said: The words.
    """
    search = _Search(is_read)
    for module in modules:
        search.look(vars(module).get, [*vars(module)])
    todo, seen = [(function, 0)], set[int]()
    for one, depth in todo:  # which grows
        own, owner = _unwrapped(one)
        if own is not None and id(own) not in seen and depth <= DEPTH:
            seen.add(id(own))
            todo += [(other, depth + 1) for other in search.code(own, owner)]
    return [(read, [key], [said]) for read, key in search.found]


class _Search:
    """Tensors that are read, by what gives them and the key: a name, or a cell of a closure."""

    def __init__(self, is_read: Callable[[torch.Tensor], bool]) -> None:
        self.is_read = is_read
        self.found: list[tuple[Callable[[Any], Any], Any]] = []

    def look(self, read: Callable[[Any], Any], keys: Iterable[Any]) -> list[Any]:
        """Note the tensors among the values of keys; return the others."""
        others = []
        for key in keys:
            value = read(key)
            if not isinstance(value, torch.Tensor):
                others.append(value)
            elif self.is_read(value):
                self.found.append((read, key))
        return others

    def code(self, function: FunctionType, owner: Any) -> list[Any]:
        """Look at what the code of a function names; return the functions that it may call."""
        names = list(dict.fromkeys(_names(function.__code__)))
        values = self.look(function.__globals__.get, names)
        values += self.look(_content, function.__closure__ or ())
        functions = []
        for value in [*values, owner]:
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                functions.append(value)
            elif isinstance(value, dict):
                self.look(value.get, names)
            elif _is_of_the_program(value):
                inner = self.look(vars(value).get, names)
                functions += [one for one in inner if isinstance(one, FunctionType)]
                methods = [getattr(type(value), name, None) for name in names]
                functions += [MethodType(m, value) for m in methods if isinstance(m, FunctionType)]
        return functions


def _is_of_the_program(value: Any) -> bool:
    """Whether attributes of an object are looked at."""
    return hasattr(value, "__dict__") and not isinstance(
        value, (torch.nn.Module, torch.optim.Optimizer, ModuleType, type)
    )


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
