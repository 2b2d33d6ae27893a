"""User registrations that wait for the next training that casts functions."""

from __future__ import annotations

from typing import Any

_USER_CAST_REGISTRY: set[tuple[Any, str, str]] = set()
_USER_PROMOTE_REGISTRY: set[tuple[Any, str, str]] = set()


def take() -> list[tuple[Any, str, str]]:
    """Return the waiting ``(module, name, kind)`` and clear the registries."""
    taken = [*_USER_CAST_REGISTRY, *_USER_PROMOTE_REGISTRY]
    _USER_CAST_REGISTRY.clear()
    _USER_PROMOTE_REGISTRY.clear()
    return taken
