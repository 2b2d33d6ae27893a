"""Where a check sits in torch: what a program does, told to the rules.

Patched are functions that a program calls (GradScaler, backward, clipping, save and load, autocast,
schedules), until the run ends. Step hooks, forward hooks and a function mode are there for the
measured steps only. A rule that raises is dropped, and named at the end: the program goes on.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from apex.debug.attaching import around, pop_mode
from apex.debug.check import autocast, loss, scales, schedules, steps, sums
from apex.debug.check.autocast import Region
from apex.debug.check.facts import SCALE, Facts, Rule, key_of, scales_of
from apex.debug.check.finding import OURS, PROGRAM, Finding, here, caller
from apex.debug.check.values import Values
from apex.debug.tensors import tensors_of

RULES = (*scales.RULES, *steps.RULES, *schedules.RULES, *autocast.RULES, *loss.RULES, *sums.RULES)
_Scaler, _Optimizer = torch.amp.GradScaler, torch.optim.Optimizer
_modes: Any = torch.overrides  # without types


class Stop(SystemExit):
    """Ends a program after its measured steps."""


class Run:
    """A check of one program.

    Attributes:
        facts: What is known, and what was found.
        failed: Rules that have raised, with their errors.
        stopped: Whether it has ended the program.
    """

    def __init__(self, limit: int = 20, *, stop: bool = False, ignored: Iterable[str] = ()) -> None:
        self.facts = Facts(limit, ignored)
        self.failed: list[str] = []
        self.stopped, self._stop = False, stop
        self._rules: list[Rule] = [rule(self.facts) for rule in RULES]
        self._depth = self._making = self._scheduling = 0
        self._network: int | None = None  # the depth of the network that runs
        self._lossy: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # that return a loss
        self._places: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._running: set[tuple[str, int]] = set()  # patched functions, by their first argument
        self._patched: set[type] = set()
        self._steps: list[tuple[Any, bool]] = []  # optimizers in their step, and whether it skips
        self._values = Values(self.facts, self._send)
        self._listeners = self._listen()
        self._undo: list[Callable[[], None]] = []
        self._undo_values: list[Callable[[], Any]] = []
        self._attach()

    # -- the rules ---------------------------------------------------------------------------------

    def _listen(self) -> dict[str, list[Callable[..., None]]]:
        rules = [rule for rule in self._rules if self.facts.measuring or rule.lasts]
        return {
            name: [getattr(one, name) for one in rules if getattr(type(one), name) is not default]
            for name, default in vars(Rule).items()
            if callable(default) and name[0] != "_"
        }

    def _send(self, event: str, *args: Any, **kwargs: Any) -> None:
        listeners = self._listeners[event]
        if not listeners or self.facts.busy:
            return
        self.facts.busy += 1
        try:
            for listener in list(listeners):
                try:
                    listener(*args, **kwargs)
                except Exception as error:  # noqa: BLE001  # the program goes on
                    self._drop(listener, error)
        finally:
            self.facts.busy -= 1

    def _drop(self, listener: Any, error: Exception) -> None:
        rule = listener.__self__
        self.failed.append(f"{type(rule).__name__}: {type(error).__name__}: {error}")
        self._rules.remove(rule)
        self._listeners = self._listen()

    def finish(self) -> list[Finding]:
        """Take everything off; return what was found."""
        while self._undo:
            self._undo.pop()()
        self._stop_values()
        self.facts.measuring = True
        self._listeners = self._listen()
        self.facts.count_steps()
        self._send("ends")
        found = list(self.facts.found.values())
        for one in found:
            one.steps = min(self.facts.steps, self.facts.limit)
        return found

    # -- attaching ---------------------------------------------------------------------------------

    def _attach(self) -> None:
        clip, cast = torch.nn.utils.clip_grad, torch.amp.autocast_mode.autocast
        for owner, name, handler in (
            (_Scaler, "__init__", self._made),
            (_Optimizer, "__init__", self._made_optimizer),
            (LRScheduler, "__init__", self._made_schedule),
            (torch.autograd, "backward", self._backward),
            *((o, n, self._clip) for o in (torch.nn.utils, clip) for n in _CLIPS if hasattr(o, n)),
            *((one, "zero_grad", self._zero_grad) for one in (_Optimizer, torch.nn.Module)),
            *((one, "compile", self._compile) for one in (torch, torch.nn.Module)),
            *((torch.nn.Module, name, self._cast) for name in ("half", "bfloat16", "to")),
            (torch, "save", self._save),
            (torch, "load", self._load),
            (cast, "__init__", self._new_region),
            (cast, "__enter__", self._enter),
            (cast, "__exit__", self._exit),
            (torch.Tensor, "register_hook", self._hook),
        ):
            self._put(owner, name, handler)
        for kind in (_Scaler, _Optimizer, *_subclasses(LRScheduler)):
            self._patch_own(kind)
        self._undo += [
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
        ]
        self._undo_values = [
            torch_modules.register_module_forward_pre_hook(self._begin_module).remove,
            torch_modules.register_module_forward_hook(self._end_module, always_call=True).remove,
            partial(pop_mode, self._values),
        ]
        _modes._push_mode(self._values)
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=partial(_stop_in_child, weakref.ref(self)))

    def _put(self, owner: Any, name: str, handler: Callable[..., Any]) -> None:
        """Patch a function; a method that calls that of its base is seen once."""

        def guarded(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            key = (name, id(args[0]) if args else 0)
            if self.facts.busy or key in self._running:
                return inner(*args, **kwargs)
            self._running.add(key)
            try:
                return handler(inner, *args, **kwargs)
            finally:
                self._running.discard(key)

        self._undo.append(around(owner, name, guarded))

    def _patch_own(self, kind: type) -> None:
        """Patch the methods that a class has itself; those of its bases are patched there."""
        of_scaler = {name: getattr(self, f"_{name.rstrip('_')}") for name in _OF_SCALER}
        load = {"load_state_dict": self._load_state_dict}
        handlers = {**load, **(of_scaler if issubclass(kind, _Scaler) else {})}
        if issubclass(kind, LRScheduler):
            handlers |= {"step": self._schedule, "_initial_step": self._make}
        for one in kind.__mro__:
            if one not in self._patched and one.__module__ != "builtins":
                self._patched.add(one)
                for name in handlers.keys() & vars(one).keys():
                    self._put(one, name, handlers[name])

    def _stop_values(self) -> None:
        """Look at no functions and forwards any more."""
        while self._undo_values:
            self._undo_values.pop()()

    def _stop_measuring(self) -> None:
        self.facts.measuring = False
        self.facts.marks.clear()
        self._listeners = self._listen()
        self._stop_values()

    # -- losses and gradients ----------------------------------------------------------------------

    def _made(self, inner: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        inner(scaler, *args, **kwargs)
        self._patch_own(type(scaler))

    def _scale(self, inner: Any, scaler: Any, outputs: Any) -> Any:
        if not scaler.is_enabled():
            return inner(scaler, outputs)
        with self._quietly():
            result = inner(scaler, outputs)
        factor = float(scaler._scale)
        self.facts.scalers.setdefault(scaler, factor)
        for one in tensors_of(result):
            if one.grad_fn is not None:
                one.grad_fn.metadata[SCALE] = factor
        self._send("scales", scaler, tensors_of(outputs), tensors_of(result), factor)
        return result

    def _get_scale(self, inner: Any, scaler: Any) -> Any:
        self.facts.asked |= caller() != OURS
        return inner(scaler)

    def _backward(self, inner: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        facts = self.facts
        self._count()
        if not facts.measuring:
            return inner(tensors, *args, **kwargs)
        facts.quiet = 0  # a step that has raised left it
        roots, place = tensors_of(tensors), here()
        facts.refresh()
        scales = scales_of(roots)
        seed = args[0] if args else kwargs.get("grad_tensors")
        self._send("backward_begins", roots if seed is None else [], scales, place)
        before = {id(param): key_of(param) for param in facts.params()}
        with self._quietly():
            result = inner(tensors, *args, **kwargs)
        written = facts.passed(before, next((s for s in scales if s is not None), None), place)
        self._send("backward_ends", written, place)
        return result

    def _clip(self, inner: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.facts.measuring:
            return inner(parameters, *args, **kwargs)
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.facts.refresh()
        with self._quietly():
            result = inner(params, *args, **kwargs)
        limits = [*args, *(kwargs.get(name) for name in ("max_norm", "clip_value"))]
        limit = next((float(one) for one in limits if one is not None), 0.0)
        self._send("clips", params, limit, result)
        self.facts.settle(params)
        return result

    def _zero_grad(self, inner: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        with self._quietly():
            result = inner(owner, *args, **kwargs)
        is_module = isinstance(owner, torch.nn.Module)
        for param in owner.parameters() if is_module else self.facts.params(owner):
            self.facts.marks.pop(id(param), None)
        return result

    def _hook(self, inner: Any, tensor: Any, hook: Any) -> Any:
        self.facts.has_hooks |= caller() != OURS
        return inner(tensor, hook)

    # -- scalers and steps -------------------------------------------------------------------------

    def _unscale(self, inner: Any, scaler: Any, optimizer: Any) -> Any:
        if not scaler.is_enabled() or not self.facts.measuring:
            return inner(scaler, optimizer)
        marks = self.facts.of(optimizer)
        try:
            with self._quietly():
                result = inner(scaler, optimizer)
        except ValueError as error:
            self._send("refuses", error)
            raise
        self._send("unscales", scaler, optimizer, marks)
        self.facts.settle(self.facts.params(optimizer), unscaled=True)
        return result

    def _step(self, inner: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        facts = self.facts
        if not scaler.is_enabled():
            return inner(scaler, optimizer, *args, **kwargs)
        self._send("scaler_steps", scaler, optimizer)
        facts.inside, count = optimizer, facts.count(optimizer)
        before = count.real
        try:
            with self._quietly():
                result = inner(scaler, optimizer, *args, **kwargs)
        finally:
            facts.inside = None
        flags = scaler._found_inf_per_device(optimizer).values()
        skipped = any(float(flag) for flag in flags)
        if skipped:
            count.real = before
        count.tried += 1
        self._end_attempt(optimizer, skipped=skipped)
        return result

    def _update(self, inner: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        with self._quietly():
            result = inner(scaler, *args, **kwargs)
        self.facts.updates += 1
        return result

    def _made_optimizer(self, inner: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        inner(optimizer, *args, **kwargs)
        self.add(optimizer)

    def add(self, optimizer: Any) -> None:
        """Look at an optimizer."""
        self.facts.optimizers.add(optimizer)
        self.facts.count(optimizer)
        self._patch_own(type(optimizer))

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        facts = self.facts
        if facts.busy:
            return None
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

        facts.quiet += 1
        self._steps.append((optimizer, _skips(optimizer)))
        if not facts.measuring:
            return None
        if closure is None:
            self._begin_step(optimizer)
            return None
        if len(args) > 1:
            return (args[0], evaluate, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluate}

    def _begin_step(self, optimizer: Any) -> None:
        params = [param for param in self.facts.params(optimizer) if param.grad is not None]
        if not self._steps[-1][1]:
            self._send("step_begins", optimizer, params)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        facts = self.facts
        if facts.busy or not self._steps:
            return
        facts.quiet = max(0, facts.quiet - 1)
        _, skipped = self._steps.pop()
        self._send("step_ends", optimizer)
        count = facts.count(optimizer)
        count.real += not skipped
        if facts.inside is not optimizer:
            count.tried += 1
            self._end_attempt(optimizer, skipped=skipped)

    def _end_attempt(self, optimizer: Any, *, skipped: bool) -> None:
        self._send("attempt_ends", optimizer, skipped=skipped)
        self.facts.asked = self.facts.low = False
        self._count()

    def _count(self) -> None:
        """Stop measuring, or the program, after its last step."""
        facts = self.facts
        facts.count_steps()
        if facts.measuring and facts.steps >= facts.limit:
            self._stop_measuring()
            if self._stop:
                self.stopped = True
                raise Stop(0)

    # -- schedules and checkpoints -----------------------------------------------------------------

    def _made_schedule(self, inner: Any, schedule: Any, *args: Any, **kwargs: Any) -> None:
        self._patch_own(type(schedule))
        self._make(inner, schedule, *args, **kwargs)
        self._send("makes_schedule", schedule)

    def _make(self, inner: Any, schedule: Any, *args: Any, **kwargs: Any) -> None:
        self._making += 1  # it calls its step()
        try:
            inner(schedule, *args, **kwargs)
        finally:
            self._making -= 1

    def _schedule(self, inner: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        if self._making or self._scheduling or args or kwargs:  # of a metric, or to a given epoch
            return inner(schedule, *args, **kwargs)
        self._count()
        self.facts.reached.add("schedule")
        self._scheduling += 1
        try:
            self._send("schedules", schedule, here())
            return inner(schedule)
        finally:
            self._scheduling -= 1

    def _save(self, inner: Any, thing: Any, *args: Any, **kwargs: Any) -> Any:
        with self._quietly():
            result = inner(thing, *args, **kwargs)
        self._send("saves", thing, here())
        return result

    def _load(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        with self._quietly():
            thing = inner(*args, **kwargs)
        self._send("loads", thing, here())
        return thing

    def _load_state_dict(self, inner: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        with self._quietly():
            result = inner(owner, *args, **kwargs)
        self._send("takes_state", owner, here())
        return result

    # -- autocast and modules ----------------------------------------------------------------------

    def _new_region(self, inner: Any, block: Any, *args: Any, **kwargs: Any) -> None:
        inner(block, *args, **kwargs)
        if self.facts.measuring:
            self._places[block] = here()

    def _enter(self, inner: Any, block: Any) -> Any:
        result = inner(block)
        if self.facts.measuring:
            place = here() if caller() == PROGRAM else self._places.get(block)
            region = Region(block.fast_dtype, block._enabled, place, block._cache_enabled)
            self.facts.regions.append(region)
            self._send("enters", region)
        return result

    def _exit(self, inner: Any, block: Any, *args: Any) -> Any:
        if self.facts.regions:
            region = self.facts.regions.pop()
            self._send("leaves", region)
        return inner(block, *args)

    def _cast(self, inner: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = {param.dtype for param in module.parameters()}
        with self._quietly():
            result = inner(module, *args, **kwargs)
        if before and {param.dtype for param in result.parameters()} - before:
            self._send("casts", module, here())
        return result

    def _compile(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        self.facts.is_blind = True  # compiled code would see the mode and the hooks
        self._stop_values()
        return inner(*args, **kwargs)

    def _begin_module(self, module: torch.nn.Module, args: Any) -> None:
        depth, self._depth = self._depth, self._depth + 1
        if self._network is None and module not in self._lossy and _has_parameters(module):
            self._network, self.facts.network = depth, 1
        if not self.facts.quiet:
            self._send("module_begins", module, args, depth)

    def _end_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._network != self._depth:
            return
        self._network, self.facts.network = None, 0
        if torch.is_grad_enabled() and not self.facts.quiet:
            if any(not one.dim() and one.requires_grad for one in tensors_of(output)):
                self._lossy.add(module)
            self._send("network_ends", module, output)

    def _quietly(self) -> Quiet:
        return Quiet(self.facts)


class Quiet:
    """Functions inside are not looked at."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def __enter__(self) -> None:
        self._facts.quiet += 1

    def __exit__(self, *_: object) -> None:
        self._facts.quiet = max(0, self._facts.quiet - 1)


_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_OF_SCALER = ("scale", "unscale_", "step", "update", "get_scale")


def _has_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _skips(optimizer: Any) -> bool:
    """Whether a flag on the optimizer makes its step do nothing."""
    scaled = getattr(optimizer, "_scaled_step", None)
    flag = getattr(optimizer, "found_inf", None) if scaled is None else scaled.noop
    return flag is not None and bool(float(flag))


def _subclasses(kind: type) -> list[type]:
    return [kind, *(below for one in kind.__subclasses__() for below in _subclasses(one))]


def _stop_in_child(run: weakref.ref[Run]) -> None:
    """Look at nothing in a child process, such as a worker of a DataLoader."""
    if (here := run()) is not None:
        here.facts.busy = 1_000_000
        here._stop_values()
