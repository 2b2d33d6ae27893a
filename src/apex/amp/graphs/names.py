"""Names by which a captured function reaches the tensors that it reads: rebinding one is noticed.

A graph reads memory. If a program rebinds a name (``mask = masks[i]``) while something else still
holds the old tensor, replays would go on with the old one, in silence. So the names in the code of
the function, and of functions of Python that it calls by name, are looked up as Python would:
globals, variables around it, ``self``, and one step further the attributes, or keys, of what is
found there; and the lists, tuples and dicts among all these are looked into.

Of several tensors in a list the function may read another one in the next call (``masks[i]``). Then
the numbers and strings that it reaches by names, such as ``i``, are followed, too. Where there are
none it is said once. An index that is a number in the code is the same in each call.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

DEPTH = 4  # of functions that call each other, and of lists in lists
MOST = 256  # elements of a list that amp.capture looks at
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_DRAWS = {"choice", "next", "pop", "popleft", "randint", "random", "randrange", "sample"}
_NUMBER = "`{}`, which may choose a tensor from a list (pass that tensor as an argument),"


Row = tuple[Callable[[Any], Any], Sequence[Any], Sequence[str]]


def rows(
    function: Any,
    modules: Iterable[torch.nn.Module],
    is_read: Callable[[torch.Tensor], bool],
    said: str,
) -> tuple[list[Row], list[str]]:
    """What to look at before each replay: what reads a value, its keys, and the words for each.

    Args:
        function: That is captured.
        modules: Whose attributes are looked at, too.
        is_read: Whether the function reads a tensor, and neither amp nor a module holds it.
        said: The words.

    Returns:
        The rows, and the names of lists of which it chose a tensor by nothing that they tell.
    """
    search, todo, seen = _Search(is_read), [(function, 0)], set[int]()
    for module in modules:
        known = len(search.choices), len(search.numbers)
        search.look(vars(module).get, [one for one in vars(module) if one not in _OF_MODULES])
        if len(search.choices) > known[0]:
            todo.append((module.forward, 0))
        else:
            del search.numbers[known[1] :]
    for one, depth in todo:  # which grows
        own, owner = _unwrapped(one)
        if own is not None and id(own) not in seen and depth <= DEPTH:
            seen.add(id(own))
            todo += [(other, depth + 1) for other in search.code(own, owner)]
    found: list[Row] = [(read, [key], [said]) for read, key in search.found]
    is_computed = None in search.constants  # then a number in the code may be another list's index
    same = {one for one in search.constants if isinstance(one, str) or not is_computed}
    chosen = [name for name, key in search.choices if key not in same]
    if chosen:
        found += [(read, [key], [_NUMBER.format(name)]) for read, key, name in search.numbers]
    return found, chosen if not search.numbers or search.constants & _DRAWS else []


class _Search:
    """What is reached by what gives it and the key: a name, a cell of a closure, a path in a list.

    Attributes:
        found: Tensors that are read.
        numbers: And strings, with their names.
        choices: Names of lists of which some tensors are read and others of their kind are not, and
            the place of one that is.
        constants: Names, strings, and numbers that the code has as an index; ``None`` if it also
            computes an index.
    """

    def __init__(self, is_read: Callable[[torch.Tensor], bool]) -> None:
        self.is_read = is_read
        self.found: list[tuple[Callable[[Any], Any], Any]] = []
        self.numbers: list[tuple[Callable[[Any], Any], Any, str]] = []
        self.choices: list[tuple[str, Any]] = []
        self.constants = set[Any]()

    def look(
        self, read: Callable[[Any], Any], keys: Iterable[Any], names: Iterable[str] | None = None
    ) -> list[Any]:
        """Note the tensors, and numbers, among the values of keys; return the others."""
        others, keys = [], [*keys]
        for key, name in zip(keys, names or map(str, keys), strict=True):
            value = read(key)
            if isinstance(value, torch.Tensor):
                if self.is_read(value):
                    self.found.append((read, key))
            elif isinstance(value, (int, str)):
                self.numbers.append((read, key, name))
            else:
                others.append(value)
                if isinstance(value, (list, tuple, dict)):
                    self._look_inside(functools.partial(_at, read, key), value, name)
        return others

    def _look_inside(self, read: Callable[[Any], Any], value: Any, name: str) -> None:
        """Note the tensors and numbers in a list, a tuple or a dict."""
        used, others = [], set()
        for path, leaf in _inside(value):
            if isinstance(leaf, (int, str)):
                self.numbers.append((read, path, name))
            elif isinstance(leaf, torch.Tensor):
                kind = leaf.shape, leaf.dtype, leaf.device
                if self.is_read(leaf):
                    used.append((kind, path[-1]))
                    self.found.append((read, path))
                else:
                    others.add(kind)
        self.choices += [(name, key) for kind, key in used if kind in others]

    def code(self, function: FunctionType, owner: Any) -> list[Any]:
        """Look at what the code of a function names; return the functions that it may call."""
        names = list(dict.fromkeys(_names(function.__code__)))
        self.constants.update(names, _indices(function.__code__))
        values = self.look(function.__globals__.get, names)
        values += self.look(_content, function.__closure__ or (), function.__code__.co_freevars)
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
                for one in filter(_is_of_the_program, inner):
                    self.look(vars(one).get, names)
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


def _indices(code: CodeType) -> Iterator[Any]:
    """Numbers that are an index in a function, and places of lists that it unpacks.

    ``None`` for an index that is computed.
    """
    before: Any = None
    for one in dis.get_instructions(code):
        is_index = one.opname == "BINARY_SUBSCR" or (one.opname, one.argrepr) == ("BINARY_OP", "[]")
        if is_index:
            is_number = before.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
            yield before.argval if is_number else None
        elif one.opname == "UNPACK_SEQUENCE":
            yield from range(one.argval)
        before = one
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _indices(inner)


def _inside(value: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The elements of a list, a tuple or a dict, and of those in it, with the path to each."""
    todo: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    found = []
    for path, one in todo:  # which grows
        if not isinstance(one, (list, tuple, dict)):
            found.append((path, one))
        elif len(path) < DEPTH:
            pairs = [*islice(one.items() if isinstance(one, dict) else enumerate(one), MOST)]
            todo += [((*path, key), inner) for key, inner in pairs[: max(0, MOST - len(todo))]]
    return found


def _at(read: Callable[[Any], Any], key: Any, path: tuple[Any, ...]) -> Any:
    """An element of a list, a tuple or a dict; ``None`` if it is not there any more."""
    value = read(key)
    try:
        for one in path:
            value = value[one]
    except (LookupError, TypeError):
        return None
    return value


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet, or deleted
        return None
