"""What the processes of ``tests/test_missing_private_names.py`` run."""

import contextlib
import functools
import importlib
import inspect
import io
import pkgutil
import sys
import traceback
from unittest import mock

import torch

WAS_IMPORTED = "apex.amp" in sys.modules  # by the server that forks, for tests of apex bench

from apex._compat import names, private  # noqa: E402
from tests import private_features  # noqa: E402


def answer(connection, function, *args):
    """Send what a function of this file returns, or the text of an error."""
    if WAS_IMPORTED:  # with what it has of torch
        connection.send(None)
        return
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            found = globals()[function](*args)
        except BaseException as error:  # noqa: BLE001  # the test shows it
            found = "".join(traceback.format_exception(error)[-8:])
    connection.send(found)


def run(feature):
    """What a program returns on this torch."""
    return getattr(private_features, feature)()


def import_everything(folder):
    """Import all modules of apex where torch has no private name at all; how many there are."""
    with mock.patch.object(private, "_find", return_value=(private._MISSING, None)):
        count = 0
        for module in pkgutil.walk_packages([folder], "apex."):
            if not module.name.startswith(("apex.kernels.", "apex.__main__")):
                importlib.import_module(module.name)
                count += 1
    return count


def run_without(path, feature):
    """What a program returns where torch lacks a name, or the error that it raises.

    With how often what apex has instead was called, or ``None`` if that is no function. torch gets
    the name back before, for it has uses of its own.
    """
    row = next(one for one in names.NAMES if one.path == path)
    with _hidden(path):
        value = getattr(private, row.name)
    calls = [0]

    def counted(*args, **kwargs):
        calls[0] += 1
        return value(*args, **kwargs)

    is_function = inspect.isroutine(value) or isinstance(value, functools.partial)
    if is_function:
        setattr(private, row.name, counted)
    try:
        found = getattr(private_features, feature)()
    except private.PrivateNameError as error:
        found = str(error)
    return found, calls[0] if is_function else None


@contextlib.contextmanager
def _hidden(path):
    """Take a name away from torch; where Python cannot, from what apex sees of torch."""
    name = path.rpartition(".")[2]
    _, owner = private._find(path)
    with contextlib.ExitStack() as stack:
        for one in (owner, *getattr(owner, "__mro__", ())):
            if name in vars(one):
                value = vars(one)[name]
                with contextlib.suppress(TypeError):  # of a class that is written in C
                    delattr(one, name)
                    stack.callback(setattr, one, name, value)
        stack.enter_context(mock.patch.dict("sys.modules", {path: None}))
        if private._find(path)[0] is not private._MISSING:
            find = functools.partial(_find_unless, path, private._find)
            stack.enter_context(mock.patch.object(private, "_find", find))
        yield


def _find_unless(path, find, asked):
    return (private._MISSING, None) if asked == path else find(asked)
