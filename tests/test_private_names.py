"""The private names of torch that apex uses are listed, and apex says what happens without them."""

import ast
import functools
import importlib
import inspect
import pkgutil
import re

import torch

from apex._compat import names, private
from tests.trees import EXTENSION_MODULES, SRC, files, tree

# Underscored attributes that are not torch's, but of Python's named tuples, functions and tests.
OF_PYTHON = {"_asdict", "_field_defaults", "_fields", "_replace", "_testMethodName"}
# Names that a class of torch has as well: there they are attributes of our own classes.
OURS = {
    "_modules": {"debug/tracing.py"},
}


def _is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


@functools.cache
def _sources():
    every = [*files(), *sorted(EXTENSION_MODULES.glob("*.py"))]
    return [file for file in every if file.parent.name != "_compat" or file.stem == "__init__"]


def _place(file):
    return file.relative_to(SRC).as_posix() if file.is_relative_to(SRC) else file.name


def _nodes(file):
    """The nodes of a file's tree, but those that only type checkers see, and docstrings."""
    waiting = [tree(file)]
    while waiting:
        node = waiting.pop()
        yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            children = node.orelse
        if isinstance(getattr(node, "body", None), list) and ast.get_docstring(node, False) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) else False:
            children = [child for child in children if child is not node.body[0]]
        waiting += children


def _chain(node):
    """The names of ``a.b.c``, or nothing."""
    found = []
    while isinstance(node, ast.Attribute):
        found.append(node.attr)
        node = node.value
    return [*reversed([*found, node.id])] if isinstance(node, ast.Name) else []


def _aliases(file):
    """What stands for a part of another package in a file, by its names there."""
    found = {}
    for node in _nodes(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree(file)):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            chain = _chain(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if chain and found.get(chain[0], "").split(".")[0] == "torch" and len(chain) > 1:
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, ".".join([found[chain[0]], *chain[1:]]))
    return found


def _paths(file):
    """Each private path of torch that a file names: imports, ``torch._C.x``, and in strings."""
    aliases, inner = _aliases(file), set()
    for node in _nodes(file):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for path in _imported(node):
                if path.split(".")[0] == "torch" and any(map(_is_private, path.split("."))):
                    yield path
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            inner |= {id(one) for one in ast.walk(node.value) if isinstance(one, ast.Attribute)}
            chain = _chain(node)
            whole = [*aliases.get(chain[0], chain[0]).split("."), *chain[1:]] if chain else []
            if whole and whole[0] == "torch" and any(map(_is_private, whole)):
                yield ".".join(whole)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\btorch(?:\.\w+)*\._[a-zA-Z]\w*", node.value)


def _imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]


def test_private_paths_of_torch_are_found_through_the_list():
    found = {f"{_place(file)}: {path}" for file in _sources() for path in _paths(file)}
    assert found == set()


def _taken(file):
    """What a file takes from ``apex._compat.private``."""
    for node in _nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module == "apex._compat.private":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and _chain(node)[:1] == ["private"]:
            yield _chain(node)[1]


def test_the_list_has_what_is_used_and_no_more():
    used = {name for file in _sources() for name in _taken(file)} - vars(private).keys()
    used |= {name for file in _sources() for name in _taken(file)} & {r.name for r in names.NAMES}
    assert used == {row.name for row in names.NAMES}
    assert len(used) == len(names.NAMES)


# -- attributes of objects -------------------------------------------------------------------------


def _defined():
    """Underscored names that a file of ours assigns, or defines."""
    found = {}
    for file in _sources():
        for node in _nodes(file):
            name = getattr(node, "name", None) or getattr(node, "id", None) or getattr(node, "attr", None)
            is_def = isinstance(node, (ast.FunctionDef, ast.ClassDef)) or isinstance(
                getattr(node, "ctx", None), ast.Store
            )
            if is_def and isinstance(name, str) and _is_private(name):
                found.setdefault(name, set()).add(_place(file))
    return found
