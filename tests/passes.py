"""How often a call goes over its lists of tensors, and how many Python frames it opens.

Times say little on a shared machine; both counts are the same on every one. A pass is a list of
many entries that is handed to what goes through it: a loop, a comprehension, ``map``, ``zip``,
another function of C. A copy of a list takes 0.3 us for 148 entries and is none. Passes are counted
in the modules named, by code in which each such place calls ``_counted`` or ``_called``; a list of
columns counts once.
"""

import ast
import builtins
import contextlib
import gc
import itertools
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

SIZED: Any = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType)
IN_TORCH = "increment_version"  # of `torch.autograd.graph`: hands what it is given to C
GO_THROUGH: Any = (
    itertools.chain,
    map,
    zip,
    filter,
    enumerate,
    tuple,
    set,
    frozenset,
    dict,
)  # not list: a copy
# Names of functions that ask a list for something without going through it.
BRIEF = {
    "any",
    "len",
    "isinstance",
    "id",
    "type",
    "getattr",
    "hasattr",
    "next",
    "iter",
    "append",
    "get",
    "super",
}


class _Marked(ast.NodeTransformer):
    """Call ``_counted`` on whatever is gone through."""

    def _mark(self, node: ast.expr) -> ast.expr:
        name = ast.Name("_counted", ast.Load())
        line = ast.Constant(node.lineno)
        return ast.copy_location(ast.Call(name, [node, line], []), node)

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.iter = self._mark(node.iter)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.iter = self._mark(node.iter)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.ops[0], ast.Eq | ast.NotEq):
            node.left = self._mark(node.left)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", None))
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                argument.value = self._mark(argument.value)
        if name not in BRIEF:
            call = ast.Name("_called", ast.Load())
            made = ast.Call(call, [function, ast.Constant(node.lineno), *node.args], node.keywords)
            return ast.copy_location(made, node)
        return node


def _codes(code: types.CodeType) -> Iterator[tuple[Any, types.CodeType]]:
    """All code inside of a module's, by where it is."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield (inner.co_name, inner.co_firstlineno, inner.co_freevars), inner
            yield from _codes(inner)


class _Passes:
    """What the marked code calls: notes file, line and entries of each pass."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.found: list[tuple[str, int, int]] = []

    def _note(self, given: Any, line: int) -> None:
        if isinstance(given, SIZED) and len(given) >= self.least:
            file = sys._getframe(2).f_code.co_filename
            self.found.append((pathlib.Path(file).name, line, len(given)))

    def counted(self, given: Any, line: int) -> Any:
        self._note(given, line)
        return given

    def called(self, function: Any, line: int, *args: Any, **named: Any) -> Any:
        if function == itertools.chain.from_iterable and isinstance(args[0], SIZED):
            self._note([x for column in args[0] for x in column], line)
        elif (
            isinstance(function, IN_C)
            or function in GO_THROUGH
            or getattr(function, "__name__", "") == IN_TORCH
        ):
            self._note(max((x for x in args if isinstance(x, SIZED)), key=len, default=()), line)
        return function(*args, **named)


@contextlib.contextmanager
def counted(packages: tuple[str, ...], least: int) -> Iterator[list[tuple[str, int, int]]]:
    """Count passes over lists of at least ``least`` entries in what these packages have loaded.

    Gives a list, which has at the end file, line and entries of each.
    """
    every = [m for name, m in sys.modules.items() if name.startswith(packages)]
    codes: dict[str, dict[Any, types.CodeType]] = {}
    for file in filter(None, (getattr(module, "__file__", None) for module in every)):
        tree = _Marked().visit(ast.parse(pathlib.Path(file).read_text(encoding="utf-8")))
        codes[file] = dict(_codes(compile(ast.fix_missing_locations(tree), file, "exec")))
    passes = _Passes(least)
    names: Any = builtins
    names._counted, names._called = passes.counted, passes.called
    before: list[tuple[types.FunctionType, types.CodeType]] = []
    was_frozen = gc.get_freeze_count()
    gc.unfreeze()  # what is frozen is not listed
    every_object = gc.get_objects()
    if was_frozen:  # by conftest.py: else each later collection takes 0.2 to 1 s
        gc.freeze()
    for function in every_object:
        if type(function) is types.FunctionType and function.__code__.co_filename in codes:
            old = function.__code__
            key = (old.co_name, old.co_firstlineno, old.co_freevars)
            new = codes[old.co_filename].get(key)
            if new is not None:
                before.append((function, old))
                function.__code__ = new
    del every_object
    try:
        yield passes.found
    finally:
        for function, old in before:
            function.__code__ = old
        del names._counted, names._called


def frames(call: Callable[[], Any]) -> list[str]:
    """The files of the Python frames that a call opens, in order."""
    files: list[str] = []

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def apex_files(call: Callable[[], Any]) -> list[str]:
    """The files of apex that a call is in, one after the other, without repeats."""
    inside = [file.rpartition("/apex/")[2] for file in frames(call) if "/src/apex/" in file]
    return [file for file, _ in itertools.groupby(inside)]
