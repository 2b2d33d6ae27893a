"""Which optimizers went through ``initialize``; weakly held."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

_managed: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that carry a state of ours
_disabled: weakref.WeakSet[Any] = weakref.WeakSet()  # those passed to a disabled initialize


def add(optimizer: Any) -> None:
    """Remember that ``optimizer`` carries a record of amp."""
    _managed.add(optimizer)


def discard(optimizer: Any) -> None:
    """Forget ``optimizer``."""
    _managed.discard(optimizer)


def managed() -> list[Any]:
    """Every optimizer that carries a record of ours."""
    return list(_managed)


def set_managed(optimizers: Iterable[Any]) -> None:
    """Have :func:`managed` return exactly ``optimizers``."""
    _managed.clear()
    _managed.update(optimizers)


def note_disabled(optimizer: Any) -> None:
    """Remember that ``optimizer`` was passed to an ``initialize`` with ``enabled=False``."""
    try:
        _disabled.add(optimizer)
    except TypeError:  # anything may be passed to a disabled initialize
        return


def is_disabled(optimizer: Any) -> bool:
    """Whether ``optimizer`` was passed to an ``initialize`` with ``enabled=False``."""
    try:
        return optimizer in _disabled
    except TypeError:
        return False


def forget_disabled() -> None:
    """Forget what :func:`note_disabled` remembers."""
    _disabled.clear()
