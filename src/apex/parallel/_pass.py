"""Backward passes: one of a wrapper, and those of all wrappers that run at a time."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from apex.parallel._bucket import Bucket


@dataclass(eq=False, slots=True)
class Pass:
    """One backward pass.

    Attributes:
        end: A weak reference to the callback at its end; dead if the pass has failed.
        reduces: Whether its gradients are reduced at all.
        arrived: Indices of parameters, in the order of their gradients; some may come twice.
        missing: The indices that each bucket waits for; empty where buckets wait for the end.
        started: The buckets on their way; ``None`` for one without trainable parameters.
        sums: ids of parameters whose gradients were sums over ranks when the pass began.
    """

    end: weakref.ref[Any]
    reduces: bool
    arrived: list[int] = field(default_factory=list)
    missing: list[set[int]] = field(default_factory=list)
    started: list[Bucket | None] = field(default_factory=list)
    sums: set[int] = field(default_factory=set)


_running: list[Pass] = []  # of all wrappers of the process


def begin(one: Pass) -> None:
    """Note that a pass has begun."""
    _running.append(one)


def forget(ended: Pass) -> None:
    """Note that a pass has ended, and forget those that have failed."""
    _running[:] = [one for one in _running if one is not ended and one.end() is not None]


def some_start_early() -> bool:
    """Whether a pass runs that starts buckets before its end."""
    return any(one.missing and one.end() is not None for one in _running)
