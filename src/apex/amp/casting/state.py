"""Whose casts are on in this thread.

Casting rests on ``torch.autocast``: its state is per thread, follows ``torch.compile``,
checkpoint recomputation and ``nn.DataParallel``, and costs nothing from Python. This module
moves that state, in two ways:

* ``hold`` switches casts on for everything the thread runs from now on (what
  ``initialize(opt_level="O1")`` does, so that a loss outside the model is cast too) until
  ``release``. No weight casts are cached there, because nothing says when they get stale.
* ``enter`` and ``leave`` bracket one forward of an initialised model, at that model's own level.
  Weight casts are cached inside and dropped at the outermost exit, as ``torch.autocast`` does.

``current`` tells the overlay and the rules whether the casts are ours, so that a program's own
``torch.autocast`` elsewhere keeps torch's meaning.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol

import torch


class Log(Protocol):
    """What is told of casts; :class:`apex.amp.casting.log.CastLog`."""

    def start(self) -> None:
        """Begin to watch this thread."""

    def stop(self) -> None:
        """Stop watching."""

    def forget(self) -> None:
        """Note that cached weight casts are gone."""

    def note_rule(self, name: str, tensors: Iterable[torch.Tensor], target: torch.dtype) -> None:
        """Log the casts of a call that a rule decides."""


class Rule(NamedTuple):
    """What happens to one function: ``kind`` is half, float, promote, native or banned.

    Or it is "in place", for a function that may not write into a 16-bit tensor.
    """

    kind: str
    message: str = ""


class Casts:
    """The function casts of one training: its 16-bit type, its rules, its log.

    Holds names and plain values only, so that models whose hooks carry it can be copied and
    pickled.
    """

    def __init__(self, dtype: torch.dtype, rules: dict[str, Rule], log: Log | None = None) -> None:
        self.dtype = dtype
        self.rules = rules
        self.log = log
        self.number = next(_numbers)
        _alive[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Casts:
        return self


# By number. Unlike a WeakSet, its list of references can be read while other threads add to it.
_alive: weakref.WeakValueDictionary[int, Casts] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class _Saved(NamedTuple):
    key: object
    casts: Casts | None
    backward: int
    nesting: int
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    nested: bool
    frame: FrameType | None = None  # whose end is the end of the forward


class _Thread(threading.local):
    def __init__(self) -> None:
        self.casts: Casts | None = None
        self.backward = -1  # the backward pass inside which ``casts`` was set; -1 outside of one
        self.nesting = 0  # of autocast blocks when ``casts`` was switched on
        self.held: _Saved | None = None
        self.stack: list[_Saved] = []
        self.off: list[dict[str, bool]] = []  # what the blocks of _Off under way will put back


thread = _Thread()


_device_types: tuple[str, ...] | None = None


def device_types() -> tuple[str, ...]:
    """Device types whose autocast state amp moves: the CPU's and the accelerator's."""
    global _device_types  # noqa: PLW0603  # a cache; Dynamo warns about functools.cache
    if _device_types is None:
        accelerator = None
        if torch.accelerator.is_available():
            accelerator = torch.accelerator.current_accelerator()
        _device_types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return _device_types


def devices_of(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """The device types among ``tensors`` that amp can cast on, sorted."""
    found = {tensor.device.type for tensor in tensors}
    return tuple(device for device in device_types() if device in found)


def current() -> Casts | None:
    """The casts whose rules apply in this thread, or ``None`` when autocast is not ours.

    In a trace and in a backward pass, autocast may be on because the state of a forward was
    restored, which says nothing of whose it was. What ``torch.utils.checkpoint`` recomputes runs
    under :func:`recompute`; for the rest the newest casts to the restored type are taken.
    """
    if torch.compiler.is_compiling():
        return thread.casts or (_newest_restored() if _alive else None)
    backward = torch._C._current_graph_task_id()
    if backward != thread.backward:
        return _newest_restored()
    if thread.casts is None and backward == -1 and _alive and _is_worker():
        return _newest_restored()
    return thread.casts


def _newest_restored() -> Casts | None:
    """The newest casts to the type that autocast casts to now."""
    dtypes = [torch.get_autocast_dtype(d) for d in device_types() if torch.is_autocast_enabled(d)]
    references = _alive.valuerefs()
    alive = [casts for reference in references if (casts := reference()) is not None]
    fitting = [casts for casts in alive if casts.dtype in dtypes]
    return max(fitting, key=lambda casts: casts.number, default=None)


def recompute(
    casts: Casts | None, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``function`` again in a backward pass, with the casts that its forward had.

    Args:
        casts: What :func:`current` was in the forward.
        function: What to call, under the autocast state of its forward.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    before = thread.casts, thread.backward
    thread.casts, thread.backward = casts, torch._C._current_graph_task_id()
    try:
        return function(*args, **kwargs)
    finally:
        heal()
        thread.casts, thread.backward = before


def in_users_block() -> bool:
    """Whether the innermost autocast block was begun by the program with ``torch.autocast``."""
    return _nesting() > thread.nesting


def _nesting() -> int:
    """How many autocast blocks of torch's or of :func:`enter` this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def refuse_users_block(call: str, *, switches_on: bool) -> None:
    """Raise if ``call`` would change autocast's state inside a ``torch.autocast`` block.

    The end of such a block puts back the state from before it, and so undoes the change.

    Args:
        call: The name of the function that the program called.
        switches_on: Whether it switches this thread's casts on.

    Raises:
        RuntimeError: This thread's casts are to be switched on inside of an enabled block, or off
            inside of any.
    """
    heal()
    if thread.stack or not in_users_block():
        return
    enabled = any(torch.is_autocast_enabled(device) for device in device_types())
    if thread.held is not None or (switches_on and enabled):
        raise RuntimeError(
            f"{call} was called inside a torch.autocast block. It changes this thread's autocast "
            f"state, which the end of the block would put back. Call {call} before the block."
        )


def _is_worker() -> bool:
    """Whether this thread was started outside of Python, as autograd's device threads are."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _save(key: object, nested: bool, frame: FrameType | None = None) -> _Saved:
    state = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in device_types()
    )
    return _Saved(
        key,
        thread.casts,
        thread.backward,
        thread.nesting,
        state,
        torch.is_autocast_cache_enabled(),
        nested,
        frame,
    )


def _set(casts: Casts | None, devices: tuple[str, ...]) -> None:
    thread.casts = casts
    if not torch.compiler.is_compiling():
        thread.backward = torch._C._current_graph_task_id()
    if casts is None:
        for device in device_types():
            torch.set_autocast_enabled(device, False)
        return
    for device in devices:
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, casts.dtype)


def _put_back(saved: _Saved) -> None:
    thread.casts, thread.backward, thread.nesting = saved.casts, saved.backward, saved.nesting
    for device, enabled, dtype in saved.autocast:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def hold(casts: Casts, devices: tuple[str, ...]) -> None:
    """Switch ``casts`` on for all that this thread runs, until :func:`release`."""
    release()
    thread.held = _save(None, nested=False)
    _set(casts, devices)
    thread.nesting = 0  # an enabled block around it was refused
    _after_blocks()
    torch.set_autocast_cache_enabled(False)
    if casts.log is not None:
        casts.log.start()


def held_by(casts: Casts) -> bool:
    """Whether :func:`hold` was last called in this thread with ``casts``."""
    return thread.held is not None and thread.casts is casts


def release() -> None:
    """Put this thread's autocast state back to what it was before :func:`hold`."""
    heal()
    saved = thread.held
    if saved is None:
        return
    if thread.casts is not None and thread.casts.log is not None:
        thread.casts.log.stop()
    thread.held = None
    _put_back(saved)
    _after_blocks()
    torch.set_autocast_cache_enabled(saved.cache)
    torch.clear_autocast_cache()


def _after_blocks() -> None:
    """Inside of :func:`off`, let the state that was just set wait for the end of the block."""
    for saved in thread.off:
        saved.update((device, torch.is_autocast_enabled(device)) for device in saved)
    for device in device_types() if thread.off else ():
        torch.set_autocast_enabled(device, False)


def enter(
    key: object,
    casts: Casts | None,
    devices: tuple[str, ...],
    frame: FrameType | None = None,
) -> None:
    """Begin a forward at its own level: ``casts`` on, or with ``None`` all casts off.

    Args:
        key: What :func:`leave` will be called with.
        casts: The level's casts.
        devices: Device types to cast on.
        frame: The frame that runs the forward, for :func:`heal`.
    """
    if frame is not None:
        heal()
    nested = casts is not None and not torch.compiler.is_compiling()
    thread.stack.append(_save(key, nested, frame))
    _set(casts, devices)
    if nested:
        thread.nesting = torch.autocast_increment_nesting()
        torch.set_autocast_cache_enabled(True)


def leave(key: object) -> None:
    """End what :func:`enter` began under ``key``; does nothing if it did not get that far."""
    stack = thread.stack
    if stack and stack[-1].key is not key:
        heal()
    if not stack or stack[-1].key is not key:
        return
    saved = stack.pop()
    _put_back(saved)
    if saved.nested:
        torch.set_autocast_cache_enabled(saved.cache)
        if torch.autocast_decrement_nesting() == 0:
            forget_weights()


def heal() -> None:
    """End forwards that were cut short without their hooks being called.

    ``nn.Module`` calls hooks after an ``Exception``, but not after a ``KeyboardInterrupt``: such
    a forward's frame is on no stack any more. Called wherever amp begins something.
    """
    stack = thread.stack
    while stack and stack[-1].frame is not None and not _is_running(stack[-1].frame):
        leave(stack[-1].key)


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


class _Off:
    """Context in which no function is cast; models called inside still compute at their level.

    What an ``initialize`` or ``reset`` inside switches on or off comes into force after it.
    """

    def __init__(self) -> None:
        self.saved: list[dict[str, bool]] = []

    def __enter__(self) -> None:
        heal()
        saved = {device: torch.is_autocast_enabled(device) for device in device_types()}
        self.saved.append(saved)
        thread.off.append(saved)
        for device in device_types():
            torch.set_autocast_enabled(device, False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        saved = self.saved.pop()
        thread.off[:] = [other for other in thread.off if other is not saved]
        for device, enabled in saved.items():
            torch.set_autocast_enabled(device, enabled)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside this context, casts as they were outside of it."""
        for device, enabled in self.saved[-1].items():
            torch.set_autocast_enabled(device, enabled)
        try:
            yield
        finally:
            for device in device_types():
                torch.set_autocast_enabled(device, False)


def off() -> _Off:
    """Switch casts off for a block."""
    return _Off()


def skip_frames(*functions: Any) -> None:
    """Tell Dynamo not to compile these frames on their own.

    At the top of a compiled model hooks run before the traced frame. Left to itself Dynamo
    compiles them as graphs of their own, whose back ends drop the change of autocast state. When
    the model is inside a compiled parent they are inlined, which this does not change.
    """
    frames = torch._C._dynamo.eval_frame
    with contextlib.suppress(AttributeError):  # private names; without them only compile differs
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for function in functions:
            frames.set_code_exec_strategy(function.__code__, strategy)
