"""The private names of torch that :mod:`apex._compat.names` lists, each found when first used.

``private.foreach_add_`` is ``torch._foreach_add_``: the object itself, so that a call costs what a
call of torch costs. Where a torch lacks a name it is what the list has instead, or something that
raises :class:`PrivateNameError` when it is called. Attributes of torch's objects are used in place;
what uses them calls :func:`need` first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.torch_version import TorchVersion

from apex._compat import instead, names

if TYPE_CHECKING:  # what is a base class or a decorator somewhere
    from torch._compile import _disable_dynamo
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    BatchNorm = _BatchNorm
    disable_dynamo = _disable_dynamo

_HERE = sys.modules[__name__]
_BY_NAME = {row.name: row for row in names.NAMES}


class PrivateNameError(RuntimeError):
    """This torch lacks a private name of torch that a feature of apex needs."""

    def __init__(self, path: str, purpose: str) -> None:
        *others, last = names.TESTED
        super().__init__(
            f"torch {torch.__version__} has no {path}. apex uses this private name of torch to "
            f"{purpose}. apex was tested with torch {', '.join(others)} and {last}: install one of "
            "these, or a newer apex."
        )


def __getattr__(name: str) -> Any:
    row = _BY_NAME.get(name)
    if row is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _value(row)
    return value


def _value(row: names.Name) -> Any:
    found, owner = _find(row.path)
    if found is not _MISSING:
        return owner if row.holder else found
    if row.without is None:
        return _Missing(row.name, (), {"path": row.path, "purpose": row.purpose})
    return None if row.without is instead.ABSENT else row.without


class _Missing(type):
    """The type of what a torch lacks: to call it, or to make an object of a subclass, raises."""

    path: str
    purpose: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise PrivateNameError(cls.path, cls.purpose)

    def __and__(cls, other: object) -> NoReturn:  # of dispatch keys
        raise PrivateNameError(cls.path, cls.purpose)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise PrivateNameError(cls.path, cls.purpose)


_MISSING = object()


def _find(path: str) -> tuple[Any, Any]:
    """What torch has under ``path``, or `_MISSING`; and what it is an attribute of."""
    owner: Any = None
    found: Any = torch
    done = "torch"
    for part in path.split(".")[1:]:
        owner, done = found, f"{done}.{part}"
        found = getattr(owner, part, _MISSING)
        if found is _MISSING and inspect.ismodule(owner):
            with contextlib.suppress(ImportError):
                found = importlib.import_module(done)
        if found is _MISSING:
            break
    return found, owner


# -- attributes of objects -------------------------------------------------------------------------


@functools.cache
def need(feature: str) -> None:
    """Raise if this torch lacks what the lists have under ``feature``.

    Raises:
        PrivateNameError: It does; the error names it.
    """
    for name in names.NAMES:
        if feature in name.features and isinstance(getattr(_HERE, name.name), _Missing):
            raise PrivateNameError(name.path, name.purpose)
    for row in names.ATTRIBUTES:
        if feature in row.features:
            for path in _missing_attributes(row):
                raise PrivateNameError(path, row.purpose)


def _missing_attributes(row: names.Attributes) -> Iterator[str]:
    """Paths of what the owner lacks; nothing if its module is not imported: there is no object."""
    module = row.owner.rpartition(".")[0]
    while module not in sys.modules and "." in module:
        if not module[module.rindex(".") + 1 :][0].isupper():
            return
        module = module.rpartition(".")[0]
    owner, _ = _find(row.owner)
    for name in row.names.split() if _is_built(row.owner) else ():
        if owner is _MISSING or not has(owner, name):
            yield f"{row.owner}.{name}"


def has(owner: Any, name: str) -> bool:
    """Whether a module has a name, objects of a class have an attribute, or a function uses it.

    Objects have what their class does not have if one of its methods mentions it. Programs replace
    ``__init__``, so all methods are looked at.
    """
    if inspect.isfunction(owner):
        return name in _words(owner)
    return hasattr(owner, name) or any(
        name in _words(method)
        for kind in getattr(owner, "__mro__", ())
        for method in vars(kind).values()
        if inspect.isfunction(method)
    )


def _is_built(path: str) -> bool:
    """Whether torch can have a name: builds for a CPU lack some, and so do those without ranks."""
    if "_cuda_" in path:
        return torch.version.cuda is not None
    return torch.distributed.is_available() or "istributed" not in path


def _words(function: Any) -> set[Any]:
    # amp.float16_weights wraps three methods; what torch wraps can be a function of C.
    code = getattr(inspect.unwrap(function), "__code__", function.__code__)
    return {*code.co_names, *code.co_consts}


# -- what is missing -------------------------------------------------------------------------------


def missing() -> dict[str, str]:
    """The names that this torch lacks, by their paths, and what happens without them."""
    found = {}
    for row in names.NAMES:
        is_asked_for = not row.before or TorchVersion(torch.__version__) < row.before
        if is_asked_for and _is_built(row.path) and _find(row.path)[0] is _MISSING:
            found[row.path] = row.effect or f"an error where apex uses it to {row.purpose}"
    for one in names.ATTRIBUTES:
        for path in _missing_attributes(one):
            found[path] = one.effect or f"an error from {', '.join(one.features)}"
    return found
