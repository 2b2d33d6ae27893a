"""The library's files, and the syntax tree of each, which a process parses once."""

import ast
import functools
import pathlib
import shutil
import subprocess

import pytest

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


def small_repository(folder, module, tests):
    """A git repository with a module and its tests."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder.mkdir()
    (folder / "module.py").write_text(module)
    (folder / "test_it.py").write_text(tests)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return folder
