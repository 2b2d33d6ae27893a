"""Warnings of a user's model, each shown once for the whole command.

A model is built and trained again for each level and seed, in processes that know nothing of each
other, and `warnings` forgets what it has shown whenever somebody changes its filters, as torch
does. So Python's own "once for each place" shows a warning dozens of times.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Warned", "each_once"]


@contextmanager
def each_once(show: Callable[[str, str], None]) -> Iterator[None]:
    """Give ``show`` each warning of this process: the place it comes from, once, and its text."""
    seen = Warned(show)

    def hook(message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
        seen(f"{filename}:{lineno}: {category.__name__}", " ".join(str(message).split()))

    with warnings.catch_warnings():
        warnings.showwarning = hook
        yield


class Warned:
    """Passes the first warning of each place on."""

    def __init__(self, show: Callable[[str, str], None]) -> None:
        self._show = show
        self._places: set[str] = set()

    def __call__(self, place: str, text: str) -> None:
        """Take a warning: ``place`` is file, line and category."""
        if place not in self._places:
            self._places.add(place)
            self._show(place, text)
