"""What a program computes outside of its model, recorded to be run again with its lines.

:class:`Lines` is a function mode of torch. ``apex debug`` turns it on between a step and the first
forward (the batch is prepared) and between a forward and backward (the loss), and off elsewhere:
always on, it takes 3 to 5 times a small step. It records functions, arguments from outside by
reference, and what was made by weak references. A ``Tape`` is what was recorded of one step, and
runs it again in the order of the program, with the forwards of the watched models in between.

Not recorded: what networks compute that are not watched (modules with parameters); what is inside
of a function mode of the program; anything once the program has called ``torch.compile``, whose
guards see function modes; amp's own functions; child processes; random numbers of a generator of
the program; and what follows 256 functions or 256 MB of arguments and results in a step.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from apex._compat import private
from apex._compat.private import tree_map
from apex.debug.attaching import pop_mode
from apex.debug.calls import Call, autocast_states, tensors_in, version_of
from apex.debug.tape import Forward, Recorded, Ref, Tape
from apex.debug.tensors import tensors_of

_MOST = 256  # functions and forwards of a step
_BYTES = 256_000_000  # of what they take and give
_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    "<frozen",
)
# Functions whose result may be memory of the program (of NumPy), and properties of tensors.
_ALIASES = {"__get__", "as_tensor", "asarray"}
_is_skipped: dict[str, bool] = {}  # file -> whether its lines are not the program's
_is_in_place: dict[str, bool] = {}  # name of a function -> whether it writes to its first argument


class Lines(TorchFunctionMode):
    """Records functions on a :class:`Tape` while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self._is_on = self._is_stopped = False
        self._left, self._depth = _MOST, 0  # the second: watched forwards that run
        self._thread: int | None = None  # where it was on first: torch may be imported in another
        self._network: torch.nn.Module | None = None  # not watched, and running now
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=partial(_stop, weakref.ref(self)))

    # -- when it is on ---------------------------------------------------------------------------

    def on(self) -> None:
        """Record what the program computes from here on."""
        if self._is_on or self._is_stopped or self._depth or self._left <= 0 or self._elsewhere():
            return
        if private.len_torch_function_stack():
            return  # a mode of the program, which it ends when it is on top
        self._is_on, self._thread = True, threading.get_ident()
        private.push_mode(self)
        private.global_forward_pre_hooks[id(self)] = self._enter
        private.global_forward_hooks[id(self)] = self._leave

    def off(self) -> None:
        """Record nothing from here on."""
        if not self._is_on or self._elsewhere():
            return
        if not pop_mode(self):
            return  # inside of a function that is recorded
        self._is_on = False
        private.global_forward_pre_hooks.pop(id(self), None)
        private.global_forward_hooks.pop(id(self), None)

    def stop(self) -> None:
        """Record nothing any more."""
        self._is_stopped = True
        self.off()
        private.global_forward_hooks.pop(id(self), None)  # of a network that has raised
        self.tape, self._left = Tape(), 0

    def _elsewhere(self) -> bool:
        """Whether another thread asks: function modes and the tape belong to one."""
        return self._thread not in (None, threading.get_ident())

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        """A network that is not watched: its outputs are taken as they are."""
        if next(module.parameters(), None) is not None:
            self.off()
            self._network = module
            private.global_forward_hooks[id(self)] = self._leave

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        if module is self._network:
            self._network = None
            self.on()

    # -- what is recorded -------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the last step, or what came before a batch or a validation."""
        if not self._elsewhere():
            self.tape, self._left = Tape(), _MOST

    def end_step(self, *, is_last: bool) -> None:
        """An optimizer has stepped; if not the last, others may step from the same forwards."""
        if is_last:
            self.begin_step()
        elif not self._elsewhere():
            if self.tape.earlier is not None:
                self.tape.earlier.earlier = None
            self.tape, self._left = Tape(earlier=self.tape), _MOST

    def begin_call(self) -> None:
        """A watched forward begins."""
        if self._elsewhere():
            return
        self.off()
        self._depth += 1
        if not torch.is_grad_enabled() and not self.tape.has_begun():
            self.begin_step()

    def end_call(self, call: Call | None, output: Any) -> None:
        """A watched forward has ended; ``None`` for one that is not replayed."""
        if self._elsewhere():
            return
        self._left -= 1
        if call is not None and self._left > 0:
            self.tape.items.append(Forward(call, self._made(tensors_in(output))))
        self._depth -= 1
        self.on()

    def backward(self, loss: torch.Tensor | None, *, is_plain: bool) -> None:
        """Backward begins; ``is_plain`` if it is from ``loss`` alone, with a gradient of 1."""
        if not self._is_on or self._elsewhere():
            return
        self.off()
        ref = None if loss is None else self.tape.ref(loss)
        if ref is None or not is_plain:
            self.tape.is_whole = False
        else:
            self.tape.losses.append(ref)

    def scaled(self, loss: torch.Tensor, scaled: torch.Tensor, scale: Any) -> None:
        """Record what amp made of a loss, in functions that were not recorded."""
        if self._is_on and not self._elsewhere() and scaled is not loss:
            self._note(_scale, (loss, scale), {}, [scaled])

    def apply(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a custom ``torch.autograd.Function``, and record it as one: its backward is its own.

        Args:
            inner: Its ``apply``.
            args: Arguments.
            kwargs: Keyword arguments.
        """
        if not self._is_on or self._elsewhere():
            return inner(*args, **kwargs)
        self.off()
        given = tensors_in((args, kwargs))
        versions = [*map(version_of, given)]
        result = inner(*args, **kwargs)
        self._left -= 1
        both = zip(given, versions, strict=True)
        written = [one for one, version in both if version_of(one) != version]  # mark_dirty
        if not all(map(self.tape.ref, written)):  # a replay would write to what the program has
            self.tape.is_whole = False
        elif results := _tensors(result):
            self._note(inner, args, kwargs, results)
        self.on()
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._left -= 1
        if self._left <= 0:
            self._give_up()
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        writes = _is_in_place.get(name)
        if writes is None:
            writes = _is_in_place[name] = _ends_in_place(name)
        if writes or kwargs.get("out") is not None:  # functions in Python pass out=None
            return self._write(func, args, kwargs)
        result = func(*args, **kwargs)
        if name in _ALIASES and _is_alias(func, args, result):
            of_made = isinstance(args[0], torch.Tensor) and self.tape.ref(args[0]) is not None
            self.tape.aliases[id(result)] = Ref(result), of_made
        elif (results := _tensors(result)) and "generator" not in kwargs:
            self._note(func, args, kwargs, results)
        return result

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = kwargs.get("out")
        if target is None and args:
            target = args[0]
        others: list[torch.Tensor] = []
        for one in (*args, *kwargs.values()):
            self._kept(one, others)
        is_known = "generator" not in kwargs and all(one.grad_fn is None for one in others)
        is_recorded = self._keep(target, is_known=is_known)
        result = func(*args, **kwargs)
        if is_recorded:
            self._note(func, args, kwargs, _tensors(result))
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        """Record a function, unless it takes what no replay makes."""
        others: list[torch.Tensor] = []
        args = [self._kept(one, others) for one in args]
        if kwargs:
            kwargs = {name: self._kept(one, others) for name, one in kwargs.items()}
        if others:
            if any(one.grad_fn is not None for one in others):
                return  # of another step, or of a network that is not watched
            self._give(others)
        frame: Any = sys._getframe(2)
        while frame is not None and _is_of_a_library(frame.f_code.co_filename):
            frame = frame.f_back
        code, at = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
        modes = autocast_states(), torch.is_grad_enabled()
        made = self._made(results)
        self.tape.items.append(Recorded(func, args, kwargs, made, code, at, *modes))

    def _kept(self, value: Any, others: list[torch.Tensor]) -> Any:
        """An argument with references to what was made; ``others`` are the other tensors in it."""
        if isinstance(value, torch.Tensor):
            ref = self.tape.ref(value)
            if ref is None:
                others.append(value)
                return value
            return ref
        if type(value) is list or type(value) is tuple:  # tree_map takes 8 us
            return type(value)([self._kept(one, others) for one in value])
        if isinstance(value, list | tuple | dict):
            return tree_map(lambda one: self._kept(one, others), value)
        return value

    def _give(self, tensors: list[torch.Tensor]) -> None:
        given = self.tape.given
        for one in tensors:
            if id(one) not in given:
                given[id(one)] = (one, version_of(one))
                if not one.requires_grad:
                    self._grow(one)

    def _made(self, tensors: list[torch.Tensor]) -> list[Ref[torch.Tensor]]:
        refs = []
        for one in tensors:
            ref = self.tape.made[id(one)] = Ref(one)
            refs.append(ref)
            self._grow(one)
        return refs

    def _grow(self, tensor: torch.Tensor, times: int = 1) -> None:
        if tensor.layout is torch.strided:
            self.tape.size += times * tensor.nbytes
            if self.tape.size > _BYTES:
                self._give_up()

    def _give_up(self) -> None:
        """Record nothing more of this step."""
        self._left = 0
        if self.tape.is_whole:
            self.tape = Tape(is_whole=False)

    def _keep(self, target: Any, *, is_known: bool) -> bool:
        """Copy a tensor of the program before a function writes to it; whether that is recorded.

        Not recorded: writes to parameters, to ``.data``, ``.grad`` and lists of tensors (masters,
        averages of weights), so that nothing that runs again can write to them. They are read as
        they are then. A generator of the program would give other numbers when it runs again.
        """
        tape = self.tape
        if not isinstance(target, torch.Tensor):
            tape.is_whole = tape.is_whole and not any(map(tape.ref, tensors_of(target)))
            return False
        if id(target) in tape.before or tape.ref(target) is not None:
            tape.is_whole = tape.is_whole and is_known
            return is_known
        alias, of_made = tape.aliases.get(id(target), (None, False))
        if alias is not None and alias() is target:
            tape.is_whole = tape.is_whole and not of_made
            return False
        if not is_known or target.requires_grad or isinstance(target, torch.nn.Parameter):
            return False
        tape.given.setdefault(id(target), (target, version_of(target)))
        tape.before[id(target)] = target.detach().clone()
        self._grow(target, times=16)  # not more than 16 MB of copies
        return True


def _stop(lines: weakref.ref[Lines]) -> None:
    """Record nothing in a child process, such as a worker of a DataLoader."""
    if (here := lines()) is not None:
        here.stop()


def _scale(loss: torch.Tensor, scale: Any) -> torch.Tensor:
    wide = loss if loss.dtype == torch.float64 else loss.float()
    return torch.mul(wide, scale)


def _tensors(result: Any) -> list[torch.Tensor]:
    """As :func:`tensors_of`, which takes 3 us more for one tensor."""
    if isinstance(result, torch.Tensor):
        return [result]
    return tensors_of(result) if isinstance(result, list | tuple | dict) else []


def _ends_in_place(name: str) -> bool:
    """Whether a function writes to its first argument, by its name."""
    in_place = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
    return in_place or name == "__setitem__"


def _is_alias(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether a result is memory whose version does not say that the program writes to it."""
    if not args or not isinstance(result, torch.Tensor):
        return False
    if func.__name__ == "__get__":
        return func.__self__.__name__ in ("data", "grad")
    return not isinstance(args[0], torch.Tensor)  # of torch.as_tensor: an array


def _is_of_a_library(file: str) -> bool:
    found = _is_skipped.get(file)
    if found is None:
        found = _is_skipped[file] = file.startswith(_SKIPPED)
    return found
