"""The thread's autocast state, and the function casts that it stands for.

Casting rests on ``torch.autocast``: its state is per thread, follows ``torch.compile``,
checkpoint recomputation and ``nn.DataParallel``, and costs nothing from Python. This module
changes that state in three ways:

* :func:`enable_for_thread` switches casts on for everything that the thread runs from now on, so
  that a loss outside the model is cast too; :func:`disable_for_thread` ends it. No weight casts
  are cached there, because nothing says when they get stale.
* :func:`begin_forward` and :func:`end_forward` bracket one forward of an initialised model, at that
  model's level. Weight casts are cached inside and dropped at the outermost end, as
  ``torch.autocast`` does.
* :func:`off` switches casts off for a block.

A forked process begins without the casts of a thread, as one that is spawned: a worker of a
DataLoader computes in float32.

:func:`current` says whether the casts in force are amp's, so that a program's own
``torch.autocast`` keeps torch's meaning.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from apex import _compat
from apex._compat import private


class Rule(NamedTuple):
    """What happens to one function: ``kind`` is half, float, promote, native or banned.

    Or it is "in place", for a function that may not write into a 16-bit tensor. A rule of Apex's
    own lists is ``shipped``: it holds for float16 only.
    """

    kind: str
    message: str = ""
    shipped: bool = False


class Casts:
    """The function casts of one training.

    Holds names and plain values only, so that models whose hooks carry it can be copied and
    pickled; :mod:`apex.amp.casting.rules` says how. Newer casts have a greater ``number``.
    """

    def __init__(self, dtype: torch.dtype, rules: dict[str, Rule], log: Any = None) -> None:
        self.dtype = dtype
        self.rules = rules
        self.log = log
        self.missed: set[str] = set()  # wrapped functions that were called and have no rule
        self.number = next(_numbers)
        _alive[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Casts:
        return self


# By number. Unlike a WeakSet, its list of references can be read while other threads add to it.
_alive: weakref.WeakValueDictionary[int, Casts] = weakref.WeakValueDictionary()
_numbers = itertools.count()


# Of some device types: whether autocast is on, and its dtype.
_States = list[tuple[str, bool, torch.dtype]]


class _Saved(NamedTuple):
    """A thread's state before a change.

    Attributes:
        key: What :func:`end_forward` is called with; ``None`` for :func:`enable_for_thread`.
        own: ``casts``, ``backward`` and ``nesting`` of :class:`_Thread`.
        cache: Whether autocast caches weight casts.
        nested: Whether the change increments torch's count of autocast blocks.
        frame: The frame that runs the forward.
    """

    key: object
    own: tuple[Casts | None, int, int]
    autocast: _States
    cache: bool
    nested: bool
    frame: FrameType | None = None


class _Thread(threading.local):
    """What this thread casts.

    Attributes:
        casts: The casts that were switched on last and not off again.
        backward: The backward pass inside of which that was done; -1 outside of one.
        nesting: The number of autocast blocks then.
        before: The state before :func:`enable_for_thread`.
        forwards: The states before the forwards under way.
        blocks: What the blocks of :func:`off` under way will put back, by device type.
    """

    def __init__(self) -> None:
        self.casts: Casts | None = None
        self.backward = -1
        self.nesting = 0
        self.before: _Saved | None = None
        self.forwards: list[_Saved] = []
        self.blocks: list[dict[str, bool]] = []


thread = _Thread()
_device_types: tuple[str, ...] | None = None


def device_types() -> tuple[str, ...]:
    """Device types whose autocast state amp changes: the CPU's and the accelerator's."""
    global _device_types  # noqa: PLW0603  # a cache; Dynamo warns about functools.cache
    if _device_types is None:
        accelerator = None
        if torch.accelerator.is_available():
            accelerator = torch.accelerator.current_accelerator()
        _device_types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return _device_types


# -- which casts are in force ----------------------------------------------------------------------


def current() -> Casts | None:
    """The casts whose rules apply in this thread, or ``None`` when autocast is not amp's.

    In a trace and in a backward pass, autocast may be on because the state of a forward was
    restored, which does not say whose it was. What ``torch.utils.checkpoint`` recomputes runs
    under :func:`recompute`; for the rest the newest casts to the restored type are taken.
    """
    if _compat.is_compiling():
        return thread.casts or (_newest_restored() if _alive else None)
    backward = private.current_graph_task_id()
    if backward != thread.backward:
        return _newest_restored()
    if thread.casts is None and backward == -1 and _alive and _is_autograds_thread():
        return _newest_restored()
    return thread.casts


def alive() -> list[Casts]:
    """The casts of all models and handles there are."""
    return [casts for reference in _alive.valuerefs() if (casts := reference()) is not None]


def _newest_restored() -> Casts | None:
    """The newest casts to the type that autocast casts to now."""
    dtypes = [torch.get_autocast_dtype(d) for d in device_types() if torch.is_autocast_enabled(d)]
    fitting = [casts for casts in alive() if casts.dtype in dtypes]
    return max(fitting, key=lambda casts: casts.number, default=None)


def _is_autograds_thread() -> bool:
    """Whether this thread was started outside of Python, as autograd's device threads are."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def recompute(
    casts: Casts | None, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``function`` again in a backward pass, with the ``casts`` of its forward.

    torch has put the autocast state of the forward back already.
    """
    before = thread.casts, thread.backward
    thread.casts, thread.backward = casts, private.current_graph_task_id()
    try:
        return function(*args, **kwargs)
    finally:
        end_interrupted_forwards()
        thread.casts, thread.backward = before


# -- the program's own autocast blocks -------------------------------------------------------------


def in_users_block() -> bool:
    """Whether the innermost autocast block was begun by the program with ``torch.autocast``."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > thread.nesting


def refuse_users_block(call: str, *, switches_on: bool) -> None:
    """Raise if ``call`` would change autocast's state inside a block that puts it back at its end.

    That are blocks of ``torch.autocast`` and ``torch.inference_mode``. Casts may not be switched
    on inside of an enabled block of the former, or any of the latter, nor off inside of any.
    """
    end_interrupted_forwards()
    if torch.is_inference_mode_enabled() and (thread.before is not None or switches_on):
        raise RuntimeError(
            f"{call} was called under torch.inference_mode(). It changes this thread's autocast "
            f"state, and the end of that block would undo the change. Call {call} outside the "
            "block."
        )
    if thread.forwards or not in_users_block():
        return
    enabled = any(torch.is_autocast_enabled(device) for device in device_types())
    if thread.before is not None or (switches_on and enabled):
        raise RuntimeError(
            f"{call} was called inside a torch.autocast block. It changes this thread's autocast "
            f"state, and the end of the block would undo the change. Call {call} before the "
            "block."
        )


# -- switching casts on and off --------------------------------------------------------------------


def _switch(casts: Casts | None, devices: tuple[str, ...]) -> None:
    thread.casts = casts
    if not torch.compiler.is_compiling():
        thread.backward = private.current_graph_task_id()
    if casts is None:
        _turn(dict.fromkeys(device_types(), False))
    else:
        _change([(device, True, casts.dtype) for device in devices])


def _put_back(saved: _Saved) -> None:
    thread.casts, thread.backward, thread.nesting = saved.own
    _change(saved.autocast)


def _change(states: _States) -> None:
    """Set autocast's state."""
    if states and not _compat.TRACES_SET_AUTOCAST and torch.compiler.is_dynamo_compiling():
        private.graph_break()
    for device, enabled, dtype in states:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _turn(enabled: dict[str, bool]) -> None:
    """Switch autocast on or off, with the dtypes that are in force."""
    if not _compat.TRACES_SET_AUTOCAST and torch.compiler.is_dynamo_compiling():
        private.graph_break()
    for device, is_on in enabled.items():
        torch.set_autocast_enabled(device, is_on)


def enable_for_thread(casts: Casts, devices: tuple[str, ...]) -> None:
    """Switch ``casts`` on for all that this thread runs, until :func:`disable_for_thread`."""
    disable_for_thread()
    _end_in_forked_processes()
    cache, own = torch.is_autocast_cache_enabled(), (thread.casts, thread.backward, thread.nesting)
    now = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types()]
    thread.before = _Saved(None, own, now, cache, nested=False)
    _switch(casts, devices)
    thread.nesting = 0  # an enabled block around it was refused
    _defer_to_end_of_off()
    torch.set_autocast_cache_enabled(False)
    if casts.log is not None:
        casts.log.start()


def is_enabled_for_thread(casts: Casts) -> bool:
    """Whether :func:`enable_for_thread` was last called in this thread with ``casts``."""
    return thread.before is not None and thread.casts is casts


def disable_for_thread() -> None:
    """Put this thread's autocast state back to what it was before :func:`enable_for_thread`."""
    end_interrupted_forwards()
    saved = thread.before
    if saved is None:
        return
    if thread.casts is not None and thread.casts.log is not None:
        thread.casts.log.stop()
    thread.before = None
    _put_back(saved)
    _defer_to_end_of_off()
    torch.set_autocast_cache_enabled(saved.cache)
    torch.clear_autocast_cache()


@functools.cache
def _end_in_forked_processes() -> None:
    """Have forked processes begin without the casts of the thread that forks them, from now on."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=disable_for_thread)


def _defer_to_end_of_off() -> None:
    """Inside of :func:`off`, have the state that was just set come into force after the block."""
    for block in thread.blocks:
        block.update((device, torch.is_autocast_enabled(device)) for device in block)
    for device in device_types() if thread.blocks else ():
        torch.set_autocast_enabled(device, False)


def begin_forward(
    key: object,
    casts: Casts | None,
    devices: tuple[str, ...],
    frame: FrameType | None = None,
) -> None:
    """Begin a forward at its own level: ``casts`` on, or with ``None`` all casts off.

    :func:`end_forward` is called with the same ``key``. ``frame`` runs the forward; ``None`` in a
    trace.
    """
    if frame is not None and thread.forwards:
        end_interrupted_forwards()
    before = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _device_types or device_types()
    ]
    nested = casts is not None and (frame is not None or not torch.compiler.is_compiling())
    cache, own = torch.is_autocast_cache_enabled(), (thread.casts, thread.backward, thread.nesting)
    is_on = thread.casts is not None or any([enabled for _, enabled, _ in before])
    changes = casts is not None or is_on
    thread.forwards.append(_Saved(key, own, before if changes else [], cache, nested, frame))
    if changes:
        _switch(casts, devices)
    if nested:
        thread.nesting = torch.autocast_increment_nesting()
        torch.set_autocast_cache_enabled(True)


def end_forward(key: object) -> bool:
    """End what was begun under ``key``; does nothing if it did not get that far.

    Returns:
        Whether it was begun with a frame: outside of a trace.
    """
    forwards = thread.forwards
    if forwards and forwards[-1].key is not key:
        end_interrupted_forwards()
    if not forwards or forwards[-1].key is not key:
        return False
    saved = forwards.pop()
    _put_back(saved)
    if saved.nested:
        torch.set_autocast_cache_enabled(saved.cache)
        if torch.autocast_decrement_nesting() == 0:
            forget_weights()
    return saved.frame is not None


def end_interrupted_forwards() -> None:
    """End forwards that were cut short without their hooks being called.

    ``nn.Module`` calls hooks after an ``Exception``, but not after a ``KeyboardInterrupt``: such
    a forward's frame is on no stack any more. Called wherever amp begins something.
    """
    forwards = thread.forwards
    while forwards and forwards[-1].frame is not None and not _is_running(forwards[-1].frame):
        end_forward(forwards[-1].key)


def _is_running(frame: FrameType) -> bool:
    here: FrameType | None = sys._getframe()
    while here is not None:
        if here is frame:
            return True
        here = here.f_back
    return False


def forget_weights() -> None:
    """Drop cached weight casts."""
    torch.clear_autocast_cache()
    if thread.casts is not None and thread.casts.log is not None:
        thread.casts.log.forget()


class off:  # in lower case, as torch.no_grad
    """Context in which no function is cast; models called inside still compute at their level.

    What an ``initialize`` or ``reset`` inside switches on or off comes into force after it.
    """

    def __enter__(self) -> None:
        if thread.forwards:
            end_interrupted_forwards()
        saved = {d: torch.is_autocast_enabled(d) for d in _device_types or device_types()}
        self.saved = saved
        thread.blocks.append(saved)
        if True in saved.values():
            _turn(dict.fromkeys(saved, False))

    def __exit__(self, *error: object) -> None:
        saved = self.saved
        thread.blocks[:] = [other for other in thread.blocks if other is not saved]
        if True in saved.values():
            _turn(saved)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside this context, casts as they were outside of the block."""
        _turn(self.saved)
        try:
            yield
        finally:
            _turn(dict.fromkeys(self.saved, False))
