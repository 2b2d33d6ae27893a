"""The library's files, and the syntax tree of each, which a process parses once."""

import ast
import functools
import pathlib

import apex

SRC = pathlib.Path(apex.__file__).parent
EXTENSION_MODULES = SRC.parent / "extension_modules"


@functools.cache
def files():
    return [file for file in SRC.rglob("*.py") if "__pycache__" not in file.parts]


@functools.cache
def tree(file):
    """The tree of a file. Tests share it: change nothing in it."""
    return ast.parse(file.read_text())
