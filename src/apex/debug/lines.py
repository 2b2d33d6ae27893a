"""What a program computes outside of its model, noted so that it can be run again with its lines.

:class:`Lines` is a function mode of torch. ``apex debug`` turns it on between a step and the first
forward (the batch is prepared) and between a forward and backward (the loss), and off elsewhere:
always on, it takes 3 to 5 times a small step. It notes functions and arguments by reference.
:class:`Tape` is what was noted of one step, and runs it again in the order of the program, with the
forwards of the watched models in between.

Not noted: what networks compute that are not watched (modules with parameters); what is inside of a
function mode of the program; anything once the program has called ``torch.compile``, whose guards
see function modes; and what follows 256 functions or 256 MB of results in a step.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from apex.debug.calls import Call, Outcome, Replay, as_it_was, tensors_in, version_of
from apex.debug.tensors import tensors_of
from apex.debug.tracing import Trace, show_line

_modes: Any = torch.overrides  # without types
_MOST = 256  # functions of a step
_BYTES = 256_000_000  # of results
_SKIPPED = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    "<frozen",
)


@dataclass
class Noted:
    """A function that a program called, and the line of the program."""

    function: Any
    args: Any
    kwargs: Any
    result: Any
    code: CodeType | None
    line: int


@dataclass
class Tape:
    """What was noted of one step.

    Attributes:
        items: Functions, and forwards of watched models with their outputs, in order.
        losses: What ``backward`` was called on.
        prepared: How many operations of a trace came before the first forward.
    """

    items: list[Noted | tuple[Call, list[torch.Tensor]]] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    is_whole: bool = True
    made: set[int] = field(default_factory=set)  # by functions and forwards
    given: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)  # others, by version
    before: dict[int, torch.Tensor] = field(default_factory=dict)  # copies of those written to
    size: int = 0
    random: torch.Tensor = field(default_factory=torch.get_rng_state)
    prepared: int = 0
    trace: Trace | None = None

    def has_begun(self) -> bool:
        """Whether a forward came."""
        return bool(self._forwards())

    def can_run(self, last: Call) -> bool:
        """Whether all was noted up to a forward, and nothing that it reads was written since."""
        same = all(
            version_of(one) == version and one.grad_fn is None  # its graph is not there any more
            for key, (one, version) in self.given.items()
            if key not in self.before
        )
        return self.is_whole and same and any(last is call for call, _ in self._forwards())

    def _forwards(self) -> list[tuple[Call, list[torch.Tensor]]]:
        return [item for item in self.items if not isinstance(item, Noted)]

    def run(self, replay: Replay, factor: float = 1.0) -> Outcome:
        """Run all again, forward and backward, at ``factor`` times the loss scale."""
        made = {key: one.clone() for key, one in self.before.items()}
        outcome, self.prepared = Outcome(), 0
        torch.set_rng_state(self.random)
        for item in self.items:
            if isinstance(item, Noted):
                self._at(item)
                args, kwargs = tree_map(lambda one: _now(one, made), (item.args, item.kwargs))
                _pair(tensors_of(item.result), tensors_of(item.function(*args, **kwargs)), made)
                continue
            self._at(None)
            if self.trace is not None and not outcome.outputs:
                self.prepared = self.trace.count
            call, outputs = item
            with as_it_was(call):
                args, kwargs = tree_map(lambda one: _now(one, made), (call.args, call.kwargs))
                now = tensors_in(call.model(*args, **kwargs))
            outcome.outputs.append(now)
            _pair(outputs, now, made)
        self._at(None)
        for number, loss in enumerate(self.losses, 1):
            now = outcome.loss = _now(loss, made)
            if now.requires_grad:
                pair = (now if factor == 1.0 else now * factor, torch.ones_like(now))
                replay.backward(outcome, [pair], [], keep=number < len(self.losses))
        return outcome

    def _at(self, item: Noted | None) -> None:
        if self.trace is not None:
            self.trace.at = show_line(item.code, item.line) if item and item.code else ""


def _now(leaf: Any, made: dict[int, torch.Tensor]) -> Any:
    return made.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf


def _pair(
    before: list[torch.Tensor], now: list[torch.Tensor], made: dict[int, torch.Tensor]
) -> None:
    made.update({id(old): new for old, new in zip(before, now, strict=False)})


class Lines(TorchFunctionMode):
    """Notes functions on a :class:`Tape` while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self._is_on = self._is_stopped = False
        self._left, self._depth = _MOST, 0  # the second: watched forwards that run
        self._thread = threading.get_ident()
        self._network: torch.nn.Module | None = None  # not watched, and running now

    # -- when it is on ---------------------------------------------------------------------------

    def on(self) -> None:
        """Note what the program computes from here on."""
        if self._is_on or self._is_stopped or self._depth or self._left <= 0 or self._elsewhere():
            return
        if _modes._len_torch_function_stack():
            return  # a mode of the program, which it ends when it is on top
        self._is_on = True
        _modes._push_mode(self)
        torch_modules._global_forward_pre_hooks[id(self)] = self._enter
        torch_modules._global_forward_hooks[id(self)] = self._leave

    def off(self) -> None:
        """Note nothing from here on."""
        if not self._is_on or self._elsewhere():
            return
        if self not in _modes._get_current_function_mode_stack():
            return  # inside of a function that is noted
        self._is_on = False
        torch_modules._global_forward_pre_hooks.pop(id(self), None)
        torch_modules._global_forward_hooks.pop(id(self), None)
        above = []
        while _modes._len_torch_function_stack():
            mode = _modes._pop_mode()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            _modes._push_mode(mode)

    def stop(self) -> None:
        """Note nothing any more."""
        self._is_stopped = True
        self.off()
        torch_modules._global_forward_hooks.pop(id(self), None)  # of a network that has raised
        self.tape = Tape()

    def _elsewhere(self) -> bool:
        """Whether another thread asks: function modes and the tape belong to one."""
        return threading.get_ident() != self._thread

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        """A network that is not watched: its outputs are taken as they are."""
        if next(module.parameters(), None) is not None:
            self.off()
            self._network = module
            torch_modules._global_forward_hooks[id(self)] = self._leave

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        if module is self._network:
            self._network = None
            self.on()

    # -- what is noted ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the last step, or what came before a batch or a validation."""
        if not self._elsewhere():
            self.tape, self._left = Tape(), _MOST

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
        if call is not None:
            outputs = tensors_in(output)
            self.tape.items.append((call, outputs))
            self._made(outputs)
        self._depth -= 1
        self.on()

    def backward(self, loss: torch.Tensor | None, *, is_plain: bool) -> None:
        """Backward begins; ``is_plain`` if it is from ``loss`` alone, with a gradient of 1."""
        if not self._is_on or self._elsewhere():
            return
        self.off()
        if loss is None or not is_plain or id(loss) not in self.tape.made:
            self.tape.is_whole = False
        else:
            self.tape.losses.append(loss)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._left -= 1
        if self._left <= 0:
            self.tape.is_whole = False
            return func(*args, **kwargs)
        writes = _writes(func, kwargs)
        is_noted = not writes or self._keep(kwargs.get("out", args[0] if args else None))
        result = func(*args, **kwargs)
        results = _tensors((result,))
        if is_noted and (results or writes):
            self._note(func, args, kwargs, result, results)
        return result

    def _note(
        self, func: Any, args: Any, kwargs: Any, result: Any, results: list[torch.Tensor]
    ) -> None:
        tape = self.tape
        for one in _tensors((*args, *kwargs.values())):
            if id(one) not in tape.made and id(one) not in tape.given:
                tape.given[id(one)] = (one, version_of(one))
        code, line = _program_line()
        tape.items.append(Noted(func, args, kwargs, result, code, line))
        self._made(results)

    def _made(self, tensors: list[torch.Tensor]) -> None:
        tape = self.tape
        for one in tensors:
            tape.made.add(id(one))
            self._grow(one)

    def _grow(self, tensor: torch.Tensor, times: int = 1) -> None:
        self.tape.size += times * tensor.nbytes if tensor.layout is torch.strided else 0
        if self.tape.size > _BYTES:
            self.tape, self._left = Tape(is_whole=False), 0

    def _keep(self, target: Any) -> bool:
        """Copy a tensor of the program before a function writes to it; whether that is noted.

        Not noted: writes to parameters and to lists of tensors (masters, averages of weights), so
        that nothing that runs again can write to them. They are read as they are then.
        """
        tape = self.tape
        if not isinstance(target, torch.Tensor):
            tape.is_whole = tape.is_whole and tape.made.isdisjoint(map(id, tensors_of(target)))
            return False
        if id(target) in tape.made or id(target) in tape.before:
            return True
        if target.requires_grad or isinstance(target, torch.nn.Parameter):
            return False
        tape.given.setdefault(id(target), (target, version_of(target)))
        tape.before[id(target)] = target.detach().clone()
        self._grow(target, times=16)  # not more than 16 MB of copies
        return True


def _tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    """As :func:`tensors_of`, which takes 3 us more for a few arguments."""
    found = []
    for one in values:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple | dict):
            found += tensors_of(one)
    return found


def _writes(function: Any, kwargs: Any) -> bool:
    """Whether a function writes to its first argument, by its name; or to ``out``."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
    return in_place or name == "__setitem__" or "out" in kwargs


def _program_line() -> tuple[CodeType | None, int]:
    """The innermost line of the program itself."""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
