"""Collectives of ``torch.distributed`` that write weights or masters: torch counts no version.

They are wrapped when the first masters are made, and ``amp.reset()`` takes the wrappers off. A
program that has imported one by its own name before has to import it again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from apex.amp.gradients.masters import table

_NAMES = ("broadcast", "all_reduce", "reduce", "scatter", "recv", "all_gather")
_originals: dict[str, Any] = {}


def install() -> None:
    """Wrap torch's functions, once; does nothing without ``torch.distributed``."""
    if not _originals and torch.distributed.is_available():
        for name in _NAMES:
            _originals[name] = function = getattr(torch.distributed, name)
            setattr(torch.distributed, name, _noted(function))


def uninstall() -> None:
    """Put torch's functions back."""
    while _originals:
        name, function = _originals.popitem()
        setattr(torch.distributed, name, function)


def _noted(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            for given in (*args, *kwargs.values()):
                listed = given if isinstance(given, (list, tuple)) else [given]
                table.note_written([one for one in listed if isinstance(one, torch.Tensor)])
        return result

    return wrapper
