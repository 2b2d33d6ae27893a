"""Where a check sits in torch: what a program does, told to the rules.

Functions that a program calls (GradScaler, backward, clipping, save and load, autocast, schedules)
are patched until the run ends. Forward hooks and a function mode are there for the measured steps
only. A rule that raises is dropped, and named at the end: the program goes on.
"""

from __future__ import annotations

import itertools
import os
import pickle
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from apex._compat import private
from apex.debug.attaching import around, pop_mode
from apex.debug.check import autocast, ends, loss, scales, schedules, steps, sums
from apex.debug.check.facts import SCALE, CheckRule, Facts, is_low, key_of, scale_of, scales_of
from apex.debug.check.finding import OURS, PROGRAM, Finding, caller, here
from apex.debug.check.values import CalledFunctions
from apex.debug.tensors import tensors_of

RULES = (
    *scales.RULES,
    *steps.RULES,
    *schedules.RULES,
    *autocast.RULES,
    *loss.RULES,
    *sums.RULES,
    *ends.RULES,
)
_Scaler, _Optimizer = torch.amp.GradScaler, torch.optim.Optimizer


def _line(name: str, error: Exception) -> str:
    """An error of a check; torch lists all of its backends in some, in over 100 lines."""
    return f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


class Stop(SystemExit):
    """Ends a program after its measured steps."""


class CheckRun:
    """A check of one program.

    Attributes:
        facts: What is known, and what was found.
        failed: Rules that have raised, with their errors.
        stopped: Whether it has ended the program.
    """

    def __init__(self, limit: int = 20, *, stop: bool = False, ignored: Iterable[str] = ()) -> None:
        private.need("apex debug")  # the same names
        self.facts = Facts(limit, ignored)
        self.failed: list[str] = []
        self.stopped, self._stop = False, stop
        self._rules: list[CheckRule] = [rule(self.facts) for rule in RULES]
        self._depth = self._scheduling = 0
        self._network: int | None = None  # the depth of the network that runs
        self._lossy: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # that return a loss
        self._places: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._theirs: Exception | None = None  # an error of the program, outside of its function
        self._running: set[tuple[str, int]] = set()  # patched functions, by their first argument
        self._patched: set[type] = set()
        self._steps: list[bool] = []  # of optimizers that are in a step: whether it is skipped
        self._values = CalledFunctions(self.facts, self._send)
        self._undo: list[Callable[[], None]] = []
        self._undo_values: list[Callable[[], Any]] = []
        self._attach()

    def _send(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of each rule that has it."""
        facts = self.facts
        if facts.busy:
            return
        facts.busy += 1
        for rule in list(self._rules):
            try:
                if (facts.measuring or rule.lasts) and hasattr(rule, event):
                    getattr(rule, event)(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # the program goes on
                self.failed.append(_line(type(rule).__name__, error))
                self._rules.remove(rule)
        facts.busy -= 1

    def finish(self) -> list[Finding]:
        """Take everything off; return what was found."""
        while self._undo:
            self._undo.pop()()
        self._stop_values()
        for one in list(self.facts.optimizers):
            self.facts.count(one)
        self.facts.measuring = True
        self._send("ends")
        findings = list(self.facts.found.values())
        for found in findings:
            found.ended(self.facts.steps, min(self.facts.steps, self.facts.limit))
        return findings

    # -- attaching ---------------------------------------------------------------------------------

    def _attach(self) -> None:
        clip, cast = torch.nn.utils.clip_grad, torch.amp.autocast_mode.autocast
        places: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            *((one, "__init__", self._made) for one in (_Scaler, _Optimizer, LRScheduler)),
            *((o, n, self._clip) for o in (torch.nn.utils, clip) for n in _CLIPS if hasattr(o, n)),
            *((one, "zero_grad", self._zero_grad) for one in (_Optimizer, torch.nn.Module)),
            *((one, "compile", self._compile) for one in (torch, torch.nn.Module)),
            *((torch.nn.Module, name, self._cast) for name in ("half", "bfloat16", "to")),
            (torch.autograd, "backward", self._backward),
            (torch.Tensor, "register_hook", self._hook),
            *((one, name, partial(self._tell, "saves")) for one, name in _SAVERS),
            (torch, "load", self._load),
            (cast, "__init__", self._new_region),
            (cast, "__enter__", self._enter),
            (cast, "__exit__", self._exit),
        )
        if hasattr(torch.autograd, "_engine_run_backward"):
            self._put(torch.autograd, "_engine_run_backward", self._engine)
        for owner, name, handler in places:
            self._put(owner, name, handler)
        for kind in (_Scaler, _Optimizer, *_subclasses(LRScheduler)):
            self._patch_own(kind)
        self._undo += [
            register_optimizer_step_pre_hook(self._guarded(self._before_step)).remove,
            register_optimizer_step_post_hook(self._guarded(self._after_step)).remove,
        ]
        self._undo_values = [
            torch_modules.register_module_forward_pre_hook(
                self._guarded(self._begin_module)
            ).remove,
            torch_modules.register_module_forward_hook(
                self._guarded(self._end_module), always_call=True
            ).remove,
            partial(pop_mode, self._values),
        ]
        private.push_mode(self._values)
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=partial(_stop_in_child, weakref.ref(self)))

    def _put(self, owner: Any, name: str, handler: Callable[..., Any]) -> None:
        """Patch a function; a method that calls that of its base is seen once.

        An error of the handler ends the check, and not the program.
        """

        def guarded(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            key = (name, id(args[0]) if args else 0)
            if self.facts.busy or key in self._running:
                return inner(*args, **kwargs)
            calls: list[tuple[Any, ...]] = []  # of the program's function: what it gave, if it did

            def called(*args: Any, **kwargs: Any) -> Any:
                calls.append(())
                calls[-1] = (inner(*args, **kwargs),)
                return calls[-1][0]

            self._running.add(key)
            try:
                return handler(called, *args, **kwargs)
            except Exception as error:
                if error is self._theirs or (calls and not calls[-1]):
                    raise
                self._break_off(name, error)
                return calls[-1][0] if calls else inner(*args, **kwargs)
            finally:
                self._running.discard(key)

        self._undo.append(around(owner, name, guarded))

    def _guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook whose own error ends the check, and not the program."""

        def guarded(*args: Any) -> Any:
            try:
                return hook(*args) if self.facts.busy < _FOR_GOOD else None
            except Exception as error:  # noqa: BLE001  # the program goes on
                self._break_off(hook.__name__, error)

        return guarded

    def _break_off(self, name: str, error: Exception) -> None:
        self.failed.append(_line(name, error))
        self.facts.busy = _FOR_GOOD

    def _patch_own(self, kind: type) -> None:
        """Patch the methods that a class has itself; those of its bases are patched there."""
        handlers: dict[str, Any] = {"load_state_dict": partial(self._tell, "takes_state")}
        if not issubclass(kind, _Optimizer):
            handlers["state_dict"] = self._state_dict
        if issubclass(kind, _Scaler):
            methods = (self._scale, self._unscale, self._step, self._update, self._get_scale)
            handlers.update(zip(_OF_SCALER, methods, strict=True))
        if issubclass(kind, LRScheduler):
            handlers |= {"step": self._schedule, "_initial_step": self._without_schedule}
        for one in set(kind.__mro__) - self._patched - {object}:
            self._patched.add(one)
            for name in handlers.keys() & vars(one).keys():
                self._put(one, name, handlers[name])

    def _made(self, inner: Any, made: Any, *args: Any, **kwargs: Any) -> None:
        self._patch_own(type(made))
        self._without_schedule(inner, made, *args, **kwargs)
        if isinstance(made, _Optimizer):
            self.add(made)
        elif isinstance(made, LRScheduler):
            self._send("makes_schedule", made)

    def add(self, optimizer: Any) -> None:
        """Look at an optimizer."""
        self.facts.optimizers.add(optimizer)
        self.facts.count(optimizer)

    def _tell(self, event: str, inner: Any, *args: Any, **kwargs: Any) -> Any:
        with self.facts.quietly():
            result = inner(*args, **kwargs)
        self._send(event, args[0] if args else kwargs["obj"])  # as torch.save and pickle.dump say
        return result

    def _stop_values(self) -> None:
        """Look at no functions and forwards any more.

        Inside a function that the mode has seen, torch has taken the mode off for that time: then
        it is taken off later.
        """
        self._undo_values = [undo for undo in self._undo_values if undo() is False]

    # -- losses and gradients ----------------------------------------------------------------------

    def _scale(self, inner: Any, scaler: Any, outputs: Any) -> Any:
        with self.facts.quietly():
            result = inner(scaler, outputs)
        if scaler.is_enabled():
            factor = scale_of(scaler)
            self.facts.scalers.setdefault(scaler, factor)
            scaled = tensors_of(result)
            nodes: list[Any] = [one.grad_fn for one in scaled if one.grad_fn is not None]
            for node in nodes:
                node.metadata[SCALE] = factor
            self._send("scales", tensors_of(outputs), scaled, factor)
        self.facts.is_off |= not scaler.is_enabled()
        return result

    def _get_scale(self, inner: Any, scaler: Any) -> Any:
        if caller() != OURS:
            self.facts.asked = self.facts.asked_late = True
        return inner(scaler)

    def _backward(self, inner: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        facts = self.facts
        self._look_at_the_limit()
        self._send("losses", tensors_of(tensors))
        if not facts.measuring:
            return inner(tensors, *args, **kwargs)
        facts.quiet, facts.asked_late = 0, False  # a step that has raised left it quiet
        facts.refresh()
        roots, at = tensors_of(tensors), here()
        scales = scales_of(roots, set(map(scale_of, facts.scalers)))
        seed = args[0] if args else kwargs.get("grad_tensors")
        self._send("backward_begins", [] if seed is not None else roots, scales, at)
        before = {id(param): key_of(param) for param in facts.params()}
        with facts.quietly():
            result = inner(tensors, *args, **kwargs)
        scale = next((one for one in scales if one is not None), None)
        self._send("backward_ends", facts.passed(before, scale, at))
        return result

    def _engine(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """Show hooks: torch hides from a mode what ``backward`` calls."""
        is_seen = self.facts.has_hooks and self._undo_values
        with self._values if is_seen else nullcontext():
            return inner(*args, **kwargs)

    def _clip(self, inner: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        self.facts.refresh()  # before an iterator is used up: its own error leaves that to torch
        try:
            params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        except Exception as error:
            self._theirs = error
            raise
        with self.facts.quietly():
            result = inner(params, *args, **kwargs)
        limits = [*args, kwargs.get("max_norm"), kwargs.get("clip_value")]
        self._send("clips", params, float(next(one for one in limits if one is not None)), result)
        self.facts.settle(params)
        return result

    def _zero_grad(self, inner: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        with self.facts.quietly():
            result = inner(owner, *args, **kwargs)
        for param in (
            owner.parameters() if isinstance(owner, torch.nn.Module) else self.facts.params(owner)
        ):
            self.facts.marks.pop(id(param), None)
        return result

    def _hook(self, inner: Any, tensor: Any, hook: Any) -> Any:
        self.facts.has_hooks |= caller() != OURS
        return inner(tensor, hook)

    # -- scalers and steps -------------------------------------------------------------------------

    def _unscale(self, inner: Any, scaler: Any, optimizer: Any) -> Any:
        params = self.facts.params(optimizer)
        self.facts.refresh()
        try:
            with self.facts.quietly():
                result = inner(scaler, optimizer)
        except ValueError as error:
            self._send("refuses", error)
            raise
        if scaler.is_enabled():
            self._send("unscales", scaler, optimizer)
            self.facts.settle(params, unscaled=True)
        return result

    def _step(self, inner: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        facts = self.facts
        if not scaler.is_enabled():
            return inner(scaler, optimizer, *args, **kwargs)
        facts.refresh()
        self._send("scaler_steps", scaler, optimizer)
        facts.inside, count = optimizer, facts.count(optimizer)
        before = count.real
        try:
            with facts.quietly():
                result = inner(scaler, optimizer, *args, **kwargs)
        finally:
            facts.inside = None
        skipped = any(
            map(float, scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        )
        count.real = before if skipped else count.real
        self._end_attempt(optimizer, skipped=skipped)
        return result

    def _update(self, inner: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        with self.facts.quietly():
            result = inner(scaler, *args, **kwargs)
        self.facts.updates += 1
        return result

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        facts = self.facts
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        begun: list[bool] = []

        def evaluate() -> Any:
            quiet, facts.quiet = facts.quiet, 0
            try:
                loss = closure()
            finally:
                facts.quiet = quiet
            if not begun:
                begun.append(True)
                self._begin_step(optimizer)
            return loss

        if facts.busy:
            return None
        facts.quiet += 1
        count = facts.count(optimizer)
        count.begun = count.tried
        self._steps.append(_skips(optimizer))
        if closure is None:
            self._begin_step(optimizer)
            return None
        if len(args) > 1:
            return (args[0], evaluate, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluate}

    def _begin_step(self, optimizer: Any) -> None:
        if not self._steps[-1]:
            self.facts.refresh()
            params = [one for one in self.facts.params(optimizer) if one.grad is not None]
            self._send("step_begins", optimizer, params)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        facts = self.facts
        if facts.busy or not self._steps:
            return
        facts.quiet = max(0, facts.quiet - 1)
        skipped = self._steps.pop()
        self._send("step_ends", optimizer)
        facts.count(optimizer).real += not skipped
        if facts.inside is not optimizer:
            self._end_attempt(optimizer, skipped=skipped)

    def _end_attempt(self, optimizer: Any, *, skipped: bool) -> None:
        self._send("attempt_ends", optimizer, skipped=skipped)
        if self.facts.measuring:
            for mark in self.facts.marks_of(self.facts.params(optimizer)):
                mark.stepped = True
        count = self.facts.count(optimizer)
        is_managed = hasattr(optimizer, "_amp_stash")
        count.tried = max(count.tried, count.begun + 1) if is_managed else count.tried + 1
        self.facts.asked = self.facts.low = False
        self._look_at_the_limit(optimizer)

    def _look_at_the_limit(self, stepped: Any = None) -> None:
        """Stop measuring, or the program, after its last step.

        Programs may have an optimizer for each parameter: later only the one that ``stepped``.
        """
        facts = self.facts
        for one in list(facts.optimizers) if facts.measuring or stepped is None else [stepped]:
            facts.count(one)
        if facts.measuring and facts.steps >= facts.limit:
            facts.measuring = False
            facts.marks.clear()
            self._stop_values()
            if self._stop:
                self.stopped = True
                raise Stop(0)
        elif not facts.measuring:
            self._stop_values()

    # -- schedules and checkpoints -----------------------------------------------------------------

    def _without_schedule(self, inner: Any, made: Any, *args: Any, **kwargs: Any) -> None:
        self._scheduling += 1  # a new schedule calls its own step()
        try:
            inner(made, *args, **kwargs)
        finally:
            self._scheduling -= 1

    def _schedule(self, inner: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._scheduling and not args and not kwargs:  # of a metric, or to a given epoch
            self.facts.reached.add("schedule")
            self._look_at_the_limit()
            self._send("schedules", schedule)
        return self._without_schedule(inner, schedule, *args, **kwargs)

    def _state_dict(self, inner: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if caller() != OURS:
            self._send("gives_state", owner)
        return inner(owner, *args, **kwargs)

    def _load(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        with self.facts.quietly():
            thing = inner(*args, **kwargs)
        self._send("loads", thing)
        return thing

    # -- autocast and modules ----------------------------------------------------------------------

    def _new_region(self, inner: Any, block: Any, *args: Any, **kwargs: Any) -> None:
        inner(block, *args, **kwargs)
        if self.facts.measuring:
            self._places[block] = here()

    def _enter(self, inner: Any, block: Any) -> Any:
        result = inner(block)
        at = here() if caller() == PROGRAM else self._places.get(block)  # of a decorator
        region = autocast.Region(block, at)
        self.facts.regions.append(region)
        self._send("enters", region)
        return result

    def _exit(self, inner: Any, block: Any, *args: Any) -> Any:
        if self.facts.regions:
            self._send("leaves", self.facts.regions.pop())
        return inner(block, *args)

    def _cast(self, inner: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self.facts.quietly():
            result = inner(module, *args, **kwargs)
        if any(map(is_low, itertools.chain(module.parameters(), module.buffers()))):
            self.facts.casts.append((weakref.ref(module), here()))
        return result

    def _compile(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        self.facts.is_blind = True  # compiled code would see the mode and the hooks
        self._stop_values()
        return inner(*args, **kwargs)

    def _begin_module(self, module: torch.nn.Module, args: Any) -> None:
        depth, self._depth = self._depth, self._depth + 1
        has_parameters = next(module.parameters(), None) is not None
        if self._network is None and has_parameters and module not in self._lossy:
            self._network, self.facts.network = depth, True
        if not self.facts.quiet:
            self._send("module_begins", module, args, depth)

    def _end_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._network != self._depth:
            return
        self._network, self.facts.network = None, False
        if torch.is_grad_enabled() and not self.facts.quiet:
            tensors = tensors_of(output)
            if any(not one.dim() and one.requires_grad for one in tensors):
                self._lossy.add(module)
            self._send("network_ends", tensors)


_FOR_GOOD = 1_000_000  # for facts.busy: the rules hear of nothing any more
_SAVERS = ((torch, "save"), (pickle, "dump"))
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_OF_SCALER = ("scale", "unscale_", "step", "update", "get_scale")


def _skips(optimizer: Any) -> bool:
    """Whether a flag on the optimizer makes its step do nothing."""
    scaled = getattr(optimizer, "_scaled_step", None)
    flag = getattr(optimizer, "found_inf", None) if scaled is None else scaled.noop
    return flag is not None and bool(float(flag))


def _subclasses(kind: type) -> list[type]:
    below: list[type] = kind.__subclasses__()
    return [kind, *(one for child in below for one in _subclasses(child))]


def _stop_in_child(run: weakref.ref[CheckRun]) -> None:
    """Look at nothing in a child process, such as a worker of a DataLoader."""
    if (here := run()) is not None:
        here.facts.busy = _FOR_GOOD
        here._stop_values()
