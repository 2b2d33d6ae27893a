"""What amp puts on an optimizer.

``OptimizerState`` is the optimizer's attribute ``_amp_stash``. All that amp knows of an optimizer
is there, so two trainings share nothing. Three methods are replaced on the instance: ``step``
(skips after an overflow, writes masters to the model), ``zero_grad`` (clears the 16-bit weights
too), ``add_param_group`` (gives new 16-bit weights masters). Two names that old programs call
compare the groups again. Where there are masters, ``_step_supports_amp_scaling`` makes torch's
GradScaler set its scale on the optimizer, so that the step can refuse it. An optimizer inside of a
wrapper gets step hooks, which do for its own ``step()`` what the wrapper's does: optimizers such as
SAM call it.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from apex.amp import checks, entries
from apex.amp.casting import switches as casts
from apex.amp.gradients import captures
from apex.amp.gradients import overflow as overflows
from apex.amp.gradients.fused import FusedGradients
from apex.amp.gradients.inside_step import InsideStep, hook_tables, is_closed
from apex.amp.gradients.ledger import Ledger, Pass, State
from apex.amp.gradients.masters import Values
from apex.amp.gradients.overflow import Overflow, SkippedStep
from apex.amp.gradients.parameters import Parameters
from apex.amp.gradients.skipping import MARK, SCALED, skipping_of
from apex.amp.gradients.step_checks import ModelCheck, StepCheck
from apex.amp.levels import HALF_TYPES
from apex.amp.training import Training, managed
from apex.ops import _runtime

_PATCHED = ("step", "zero_grad", "add_param_group")
_OLD_HOOKS = ("_lazy_init_maybe_master_weights", "_amp_lazy_init")  # called by old programs


def _of_groups(name: str) -> property:
    """A list of ``Parameters``, made after a look at the groups."""

    def get(state: OptimizerState) -> list[torch.Tensor]:
        state.params.compare_groups()
        return list(getattr(state.params, name))

    return property(get)


class OptimizerState:
    """amp's record of one optimizer.

    With ``use_masters``, 16-bit weights get float32 masters; ``full`` has float32 values from
    before they were rounded. ``had_views``: whether weights of the models shared memory with the
    optimizer's tensors before they were cast.

    Attributes:
        superseded: Whether its model went through another ``initialize`` without it.
        lazy_init_called: Read and written by old programs.
    """

    def __init__(
        self,
        optimizer: Any,
        training: Training,
        use_masters: bool,
        full: Values,
        *,
        had_views: bool = False,
    ) -> None:
        entries.complete(optimizer)
        self.training = training
        self.use_masters = use_masters
        self.superseded = False
        self.lazy_init_called = True
        self.optimizer = weakref.ref(optimizer)
        changed = weakref.WeakMethod(self._find_models_and_owners)
        self.params = params = Parameters(optimizer, use_masters, lambda: changed()())  # type: ignore[misc]
        asked = training.fused_step or not getattr(optimizer, "materialize_master_grads", True)
        self.skipping = skipping = skipping_of(optimizer, params)
        fused = FusedGradients(params) if asked and skipping.scales else None
        self.ledger = Ledger(params, training, fused)
        self.overflow = Overflow(
            training.verbosity, training.max_skipped_steps, overflows.counts_of(params.in_groups())
        )
        # Until an optimizer was seen to step the masters it was given; those of apex.optimizers do.
        needs_check = use_masters and not skipping.scales
        self._step_check = StepCheck(optimizer, params) if needs_check else None
        casts_model = training.properties.cast_model_type in HALF_TYPES
        check = ModelCheck(optimizer, params, training, had_views=had_views)
        self._model_check = check if casts_model else None
        self.is_stepping = self._inner_is_skipped = self._is_captured = False
        self.observer: Any = None  # a watch of apex.debug
        params.compare_groups(full)
        training.add_ledger(self.ledger)
        attributes: dict[str, Any] = {"_amp_stash": self}
        attributes.update(dict.fromkeys(_OLD_HOOKS, params.compare_groups))
        if use_masters:
            attributes[MARK] = True
        methods = {name: getattr(self, name) for name in _PATCHED}
        self._replaced = Replaced(optimizer, methods, attributes)
        self._inner_step = self._replaced.inner["step"]
        self._replaced.watch(optimizer, weakref.ref(self))
        inside = optimizers_inside(optimizer)
        self._is_closed = is_closed(wrappers_inside(optimizer), self._inner_step)
        self._hooks = hook_tables([optimizer, *inside])
        self._own_hooks = 2 * len(inside)
        if use_masters:
            entries.share([optimizer, *inside], params)
        managed.add(optimizer)

    def _find_models_and_owners(self) -> None:
        params = self.params
        self.training.find_shared()
        params.records, params.outside = self.training.records_of(params.targets)

    def detach(self) -> None:
        """Give the optimizer its own methods back, and the model's weights in its groups."""
        optimizer = self.optimizer()
        managed.discard(optimizer)
        if optimizer is None or not self._replaced.is_on:
            return
        self.ledger.unscale_delayed(check=False)
        self.params.compare_groups()
        self._replaced.take_off(optimizer)
        entries.unshare([optimizer, *optimizers_inside(optimizer)])
        self.params.restore()

    # -- what scale_loss, clipping and readers need --------------------------------------------

    def refuse_superseded(self) -> NoReturn:
        """Raise: the model was initialised again without this optimizer."""
        raise RuntimeError(
            "amp: the model of this optimizer went through another amp.initialize, which made new "
            "masters of its weights. Pass both optimizers in one call: amp.initialize(model, "
            "[first, second], ...)."
        )

    def _is_open(self) -> bool:
        """Whether a block is open, of this optimizer or of one that shares a parameter."""
        if not self.training.shared:
            return self.ledger.state is State.OPEN
        return any([ledger.state is State.OPEN for ledger in self.ledger.with_co_owners()])

    def collect(self) -> None:
        """Bring every gradient to where the optimizer looks for it, unscaled."""
        if self._is_open():
            raise RuntimeError(
                "amp: gradients are still scaled inside the scale_loss block. Clip after it."
            )
        self.ledger.refuse_scaled_elsewhere()
        self.ledger.collect()

    def clip_fused(self, max_norm: float, *, error_if_nonfinite: bool) -> torch.Tensor | None:
        """Leave clipping to a fused step; ``None`` where gradients are not kept scaled for one."""
        fused = self.ledger.fused
        if fused is None or self.ledger.state is not State.FOR_STEP:
            return None
        return fused.clip(max_norm, error_if_nonfinite=error_if_nonfinite)

    def unscale(self) -> None:  # LARC calls it, too
        """Let a reader find gradients as they will be stepped; inside a block they are scaled."""
        if self.ledger.state is State.FOR_STEP:
            self.ledger.unscale_delayed()

    def expose(self) -> None:
        """Let the program have the masters, which count as written until the next forward."""
        params, ledger = self.params, self.ledger
        self.unscale()
        if self._is_open():
            ledger.warn_of_scaled()
        if params.weights:
            params.match_requires_grad()
            params.reconcile(compare=not ledger.steps)
            params.expose()
            for record in params.records:
                record.exposed[id(params)] = params

    # -- the step ------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, unless a pass since the last one was not finite.

        "A step at O2" in docs/how-it-works.md goes through it.
        """
        closure = args[0] if args else kwargs.get("closure")
        counted = None if closure is None else self.overflow.counts.numbers.clone()
        given = self._decide(has_closure=closure is not None)
        if given is None:  # skipped
            return None
        known = self._own_hooks + captures.hooks
        is_closed = self._is_closed and sum(map(len, self._hooks)) == known
        # Else code of the program may run in it, which matters where there are masters.
        inside = None if is_closed or not self.params.weights else InsideStep(self.params)
        off, scaled, is_written = casts.off(), given.get(SCALED), False
        if closure is not None:
            args = self._evaluated(closure, off, inside), *args[1:]
            kwargs = {name: value for name, value in kwargs.items() if name != "closure"}
        self.is_stepping = True
        try:
            with off:
                if given or inside or self._step_check is not None or self._model_check is not None:
                    result = self._step_given(given, args, kwargs, inside)
                else:
                    result = self._inner_step(*args, **kwargs)
            is_written = scaled is not None and bool(scaled.copies)
            self.is_stepping = True  # also where a wrapper has caught the closure's error
        finally:  # an error in the step or in a hook ends it too
            has_ended, self.is_stepping = self.is_stepping, False
            casts.forget_weights()
            if scaled is not None and scaled.grads is not None:
                self.ledger.fused.free()  # type: ignore[union-attr]
            if has_ended:
                self.ledger.after_step(is_taken=True, is_written=is_written, inside=inside)
            else:  # the closure has raised: no step was made, and gradients stay
                self.overflow.counts.numbers.copy_(counted)  # type: ignore[arg-type]
                if inside is not None:
                    inside.finish()
        return result

    def _decide(self, *, has_closure: bool, is_inner: bool = False) -> dict[str, Any] | None:
        """Decide whether to skip a step; ``is_inner``: of the optimizer inside of a wrapper.

        Returns what the optimizer's own step is given, see :mod:`~apex.amp.gradients.skipping`;
        ``None`` where the host has skipped it.
        """
        self._refuse_step(has_closure=has_closure)
        by_device = self.skipping.takes_flag and not is_inner and not has_closure
        ledger, watch, scaled, noop = self.ledger, self.observer, None, None
        if by_device and ledger.state is State.FOR_STEP:
            scaled = ledger.take_for_step()  # else gradients are unscaled, where the step looks
        passes, is_new = ledger.take_passes(collect=scaled is None)
        flags = [one.found_inf for one in passes] if by_device and watch is None else []
        if flags and self.skipping.may_defer(flags):
            noop = self.overflow.defer(passes, is_new=is_new)
            ledger.leave(passes)
        else:
            if self._is_captured:
                self._refuse_read(passes)
            report = self.overflow.read(passes, is_new=is_new)
            # The watch looks before gradients are freed. What is not new, it has seen.
            if watch is not None and is_new and self.training.is_dynamic():
                scale = float(passes[0 if report is None else report.place].scale)
                watch.stepped(self.optimizer(), report is not None, scale)
            if report is not None:
                self._skip(report, passes, is_fused=scaled is not None)
                return None
        return self.skipping.given(noop, scaled) if by_device else {}

    def _refuse_step(self, *, has_closure: bool) -> None:
        if self.ledger.state is State.OPEN or (self.training.shared and self._is_open()):
            raise RuntimeError(
                "amp: step() was called inside the scale_loss block, while gradients are still "
                "scaled. Call it after the block."
            )
        if self.superseded:
            self.refuse_superseded()
        if self.training.unnoticed.written:
            self.training.unnoticed.before_step(self.training, self.params.targets)
        if self.ledger.scaled_elsewhere:
            self.ledger.refuse_scaled_elsewhere()
        if has_closure and self.training.is_dynamic():
            raise RuntimeError(
                "amp: step() got a closure, but with dynamic loss scaling amp can skip a step "
                "after the closure ran. Use a static loss_scale (or O4, O5), or call backward "
                "before step()."
            )
        self._is_captured = _runtime.capturing()
        if self._is_captured or self.ledger.is_captured:
            self._refuse_part()
        if self.overflow.sent:
            self.overflow.log_reports()
        optimizer = self.optimizer()
        if self.use_masters and getattr(optimizer, "found_inf", None) is not None:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[union-attr]
            raise RuntimeError(
                "amp: torch's GradScaler cannot drive this optimizer at "
                f"{self.training.properties.opt_level}, because the optimizer updates float32 "
                "masters and the gradients are on the 16-bit model. Use amp.scale_loss, or O1 or "
                "O4."
            )

    def _refuse_part(self) -> None:
        """Refuse the capture of a step without its block, or of a block without its step."""
        block = self.ledger.is_captured
        if block is None or block is self.overflow.counts.are_captured():
            return
        if self.training.is_dynamic() or self.params.weights or self.ledger.fused is not None:
            captures.refuse_part(self.optimizer(), block=block)

    def _refuse_read(self, passes: list[Pass]) -> None:
        """Refuse the capture of a step that the host decides."""
        self.overflow.counts.check_capture()
        watched = self.observer is not None
        if passes or watched:
            takes_flag = self.skipping.takes_flag
            captures.refuse_read(self.optimizer(), takes_flag=takes_flag, is_watched=watched)

    def _evaluated(self, closure: Any, off: casts.off, inside: InsideStep | None) -> Any:
        """A closure of the program, around which all is as it is outside of a step."""

        def evaluate() -> Any:
            if inside is None:
                self.params.write()  # the optimizer may have moved the masters since
            self.is_stepping = False
            with contextlib.nullcontext() if inside is None else inside.paused():
                with off.lifted():
                    loss = closure()
                self.ledger.collect()
                if self._step_check is not None:
                    self._step_check.begin(again=True)
            self.is_stepping = True
            return loss

        return evaluate

    def _step_given(
        self, given: dict[str, Any], args: Any, kwargs: Any, inside: InsideStep | None
    ) -> Any:
        """The optimizer's own step; watched until one that the host decided changed a master."""
        check = None if given else self._step_check
        watch = self.observer
        if (check or (self._model_check and not self.params.records)) and _runtime.capturing():
            captures.refuse_check(self.optimizer())
        if check is not None:
            check.begin()
        optimizer: Any = self.optimizer()
        try:
            if optimizer is not None:
                vars(optimizer).update(given)
            step = self._inner_step if inside is None else inside.watched(self._inner_step)
            result = step(*args, **kwargs)
        finally:
            for name in given if optimizer is not None else ():
                vars(optimizer).pop(name, None)
        if watch is not None and watch.fault is not None:
            check = None  # the watch has skipped the step
        if check is not None and check.end(self.training.properties.opt_level):
            self._step_check = None
        if self._model_check is not None and (self.params.records or self._model_check.end()):
            self._model_check = None
        return result

    def before_inner_step(self, inner: Any, args: Any, kwargs: Any) -> None:
        """Have a step of the optimizer inside of a wrapper skipped or refused, as the wrapper's."""
        if self.is_stepping:
            return
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args has the optimizer
        has_closure = closure is not None
        if has_closure and self.use_masters:
            self._refuse_step(has_closure=True)
            raise RuntimeError(
                f"amp: the program called step(closure) of the {type(inner).__name__} inside a "
                f"{type(self.optimizer()).__name__}. The closure would run before amp writes the "
                "masters to the model. Call step(closure) of the object that was passed to "
                "amp.initialize, or pass the inner optimizer to amp.initialize."
            )
        self._inner_is_skipped = self._decide(has_closure=has_closure, is_inner=True) is None
        if not self._inner_is_skipped:
            return
        for param in self.params.stepped:
            param.grad = None  # so that the step changes nothing

    def after_inner_step(self, *arguments: object) -> None:
        """Write the masters to the model after a step of the optimizer inside of a wrapper."""
        if not self.is_stepping and not self._inner_is_skipped:
            casts.forget_weights()
            self.ledger.after_step(is_taken=True)

    def before_state_dict(self, _: Any) -> None:
        """Drop what lookups of the model's weights have left in the state."""
        self.params.forget_lookups()

    def after_load(self, inner: Any) -> None:
        """Share the state that ``load_state_dict`` has put into an optimizer."""
        if self.use_masters:
            entries.share([inner], self.params)

    def _skip(self, report: SkippedStep, passes: list[Pass], *, is_fused: bool) -> None:
        self.ledger.leave(passes)
        self.overflow.log(report)
        # Let torch's schedulers count a skipped step as taken, on a wrapped optimizer too.
        optimizer: Any = self.optimizer()
        for one in () if optimizer is None else (optimizer, *vars(optimizer).values()):
            if one is optimizer or isinstance(one, torch.optim.Optimizer):
                setattr(one, "_opt_called", True)  # noqa: B010  # torch's types have no such name
        message = None
        if report.skipped >= self.overflow.limit:
            loss = passes[report.place].loss
            message = overflows.describe_dead_training(self.ledger, report, loss)
            watched = self.observer.sentence() if self.observer is not None else ""
            message += f" {watched or overflows.HOW_TO_WATCH}"
        if is_fused and self.ledger.fused is not None:
            self.ledger.fused.free()
        casts.forget_weights()
        self.ledger.after_step(is_taken=False)
        if message is not None:
            raise RuntimeError(message)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own, and the same for the model weights behind masters."""
        # Unscale first: if a delayed pass overflowed, its other optimizers must skip too.
        for ledger in self.ledger.with_co_owners() if self.training.shared else (self.ledger,):
            if ledger.scaled is not None:
                ledger.unscale_delayed(check=False)
        late = [one for one in self.ledger.passes if not one.is_final]
        if late and self.ledger.state is not State.OPEN:
            self.ledger.check_again(late)
        if self.params.weights and any([record.is_compiled for record in self.params.records]):
            self.params.reconcile()  # the forward will not do it
        self._replaced.inner["zero_grad"](*args, **kwargs)
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        self.ledger.clear(set_to_none=bool(set_to_none))

    def add_param_group(self, group: Any) -> None:
        """The optimizer's own; 16-bit weights in the new group get masters."""
        checks.check_groups(self.optimizer(), [group], "add_param_group")
        self._replaced.inner["add_param_group"](group)
        self.params.compare_groups()

    # -- what old programs look at -------------------------------------------------------------

    all_fp16_params = _of_groups("weights")  # of the model, in 16 bits, that have masters
    all_fp32_from_fp16_params = _of_groups("tensors")  # their masters, in the same order
    all_fp32_from_fp32_params = _of_groups("plain")  # what is its own master


def state_of(optimizer: Any) -> OptimizerState | None:
    """Return amp's record of ``optimizer``, or ``None`` if it was never initialised."""
    state = getattr(optimizer, "_amp_stash", None)
    return state if isinstance(state, OptimizerState) else None


class Replaced:
    """What amp has put on one optimizer: ``methods`` for its own ones, and other ``attributes``."""

    def __init__(
        self, optimizer: Any, methods: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> None:
        self.inner = {name: getattr(optimizer, name) for name in methods}
        self._before = {n: v for n, v in vars(optimizer).items() if n in {*methods, *attributes}}
        self._attributes = list(attributes)
        self._hooks: list[Any] = []
        self.is_on = True
        for name, value in attributes.items():
            setattr(optimizer, name, value)
        for name, method in methods.items():
            setattr(optimizer, name, types.MethodType(self._replacement(name, method), optimizer))

    def _replacement(self, name: str, method: Any) -> Any:
        """A function instead of the optimizer's ``name``, marked like the original.

        The marks are those by which torch's schedulers know a step that they have wrapped.
        """
        inner = self.inner[name]

        @functools.wraps(getattr(inner, "__func__", inner))
        def replacement(_: Any, *args: Any, **kwargs: Any) -> Any:
            # a scheduler may still hold this after the optimizer was released
            return (method if self.is_on else inner)(*args, **kwargs)

        return replacement

    def take_off(self, optimizer: Any) -> None:
        """Give the optimizer its own methods and attributes back."""
        self.is_on = False
        for hook in self._hooks:
            hook.remove()
        for name in (*self.inner, *self._attributes):
            if name in self.inner and not isinstance(vars(optimizer).get(name), types.MethodType):
                continue  # wrapped by other code since: what that code holds calls through now
            if name in self._before:
                setattr(optimizer, name, self._before[name])
            else:
                vars(optimizer).pop(name, None)

    def watch(self, optimizer: Any, record: weakref.ref[Any]) -> None:
        """Put hooks on state dicts, and on steps of the optimizers inside of a wrapper."""

        def hook(name: str) -> Any:
            def call(*arguments: Any) -> None:
                if (state := record()) is not None:
                    getattr(state, name)(*arguments)

            return call

        inside = optimizers_inside(optimizer)
        for one in inside:
            self._hooks.append(one.register_step_pre_hook(hook("before_inner_step")))
            self._hooks.append(one.register_step_post_hook(hook("after_inner_step")))
        for one in (optimizer, *inside):
            if hasattr(one, "register_state_dict_pre_hook"):
                self._hooks.append(one.register_state_dict_pre_hook(hook("before_state_dict")))
                self._hooks.append(one.register_load_state_dict_post_hook(hook("after_load")))


def optimizers_inside(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Torch's optimizers inside of a wrapper, or of a wrapper in it, with the same groups."""
    found = wrappers_inside(optimizer)[1:]
    return [inner for inner in found if isinstance(inner, torch.optim.Optimizer)]


def wrappers_inside(optimizer: Any) -> list[Any]:
    """An optimizer, and what has the same groups inside of it."""
    wrappers = [optimizer]
    for wrapper in wrappers:
        for inner in list(getattr(wrapper, "__dict__", {}).values()):
            is_known = any(inner is other for other in wrappers)
            if not is_known and getattr(inner, "param_groups", None) is optimizer.param_groups:
                wrappers.append(inner)
    return wrappers
