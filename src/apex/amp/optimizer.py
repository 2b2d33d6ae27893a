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

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.optim import optimizer as torch_optimizer

from apex.amp import checks, entries
from apex.amp.casting import state as casts
from apex.amp.gradients import captures
from apex.amp.gradients import overflow as overflows
from apex.amp.gradients.fused import FusedGradients
from apex.amp.gradients.ledger import Ledger, Pass, State
from apex.amp.gradients.overflow import Overflow
from apex.amp.gradients.parameters import Parameters
from apex.amp.gradients.step_checks import ModelCheck, StepCheck
from apex.amp.policy import HALF_TYPES
from apex.amp.replaced import Replaced, optimizers_inside
from apex.amp.training import Training, managed
from apex.ops import _runtime
from apex.ops.lists.storage import ScaledStep

_PATCHED = ("step", "zero_grad", "add_param_group")
_OLD_HOOKS = ("_lazy_init_maybe_master_weights", "_amp_lazy_init")  # called by old programs
_MARK = "_step_supports_amp_scaling"


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
        full: Mapping[torch.Tensor, torch.Tensor],
        *,
        had_views: bool = False,
    ) -> None:
        entries.complete(optimizer)
        self.training = training
        self.use_masters = use_masters
        self.superseded = False
        self.lazy_init_called = True
        self._optimizer = weakref.ref(optimizer)
        changed = weakref.WeakMethod(self._find_models_and_owners)
        self.params = params = Parameters(optimizer, use_masters, lambda: changed()())  # type: ignore[misc]
        asked = training.fused_step or not getattr(optimizer, "materialize_master_grads", True)
        self._is_fused = hasattr(optimizer, "step_scaled")  # one of apex.optimizers
        fused = FusedGradients(params) if asked and self._is_fused else None
        self.ledger = Ledger(params, training, fused)
        self.overflow = Overflow(
            training.verbosity, training.max_skipped_steps, overflows.counts_of(params.in_groups())
        )
        self._takes_flag = self._is_fused or bool(getattr(optimizer, _MARK, False))
        # Until an optimizer was seen to step the masters it was given; those of apex.optimizers do.
        needs_check = use_masters and not self._is_fused
        self._step_check = StepCheck(optimizer, params) if needs_check else None
        casts_model = training.properties.cast_model_type in HALF_TYPES
        check = ModelCheck(optimizer, params, training, had_views=had_views)
        self._model_check = check if casts_model else None
        self._is_stepping = self._inner_is_skipped = False
        self.observer: Any = None  # a watch of apex.debug
        params.sync(full)
        training.add_ledger(self.ledger)
        attributes: dict[str, Any] = {"_amp_stash": self}
        attributes.update(dict.fromkeys(_OLD_HOOKS, params.sync))
        if use_masters:
            attributes[_MARK] = True
        methods = {name: getattr(self, name) for name in _PATCHED}
        self._replaced = Replaced(optimizer, methods, attributes)
        self._inner_step = self._replaced.inner["step"]
        self._replaced.watch(optimizer, weakref.ref(self))
        owners = [optimizer, *optimizers_inside(optimizer)] if use_masters else []
        self._sharing = entries.Sharing(owners, params)
        managed.add(optimizer)

    def _find_models_and_owners(self) -> None:
        self.training.find_shared()
        self.ledger.records, self.ledger.outside = self.training.records_of(self.params.targets)

    def detach(self) -> None:
        """Give the optimizer its own methods back, and the model's weights in its groups."""
        optimizer = self._optimizer()
        managed.discard(optimizer)
        if optimizer is None or not self._replaced.is_on:
            return
        self.ledger.unscale_delayed(check=False)
        self.params.sync()
        self._replaced.take_off(optimizer)
        self._sharing.take_off([optimizer, *optimizers_inside(optimizer)])
        self.params.restore()

    # -- what scale_loss, clipping and readers need --------------------------------------------

    def refuse_superseded(self) -> NoReturn:
        """Raise: the model was initialised again without this optimizer."""
        raise RuntimeError(
            "amp: the model of this optimizer went through another amp.initialize, which made new "
            "masters of its weights. Pass both optimizers in one call: "
            "amp.initialize(model, [first, second], ...)."
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
        if params.weights:
            params.match_requires_grad()
            params.reconcile(compare=not ledger.has_stepped)
            params.expose()
            for record in ledger.records:
                record.exposed[id(self)] = params

    # -- the step ------------------------------------------------------------------------------

    def can_skip(self) -> bool:
        """Whether any step of this optimizer could be skipped."""
        return any([scaler.dynamic for scaler in self.training.loss_scalers])

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, unless a pass since the last one was not finite."""
        closure = args[0] if args else kwargs.get("closure")
        self._refuse_step(has_closure=closure is not None)
        if self.overflow.sent:
            self.overflow.log_reports()
        if closure is not None:
            return self._step_with(closure, args, kwargs)
        ledger = self.ledger
        if ledger.state is State.FOR_STEP and self._has_pre_hooks():  # they see them unscaled
            ledger.unscale_delayed()
        options = ledger.take_for_step()
        is_fused = options is not None
        if not is_fused:
            self._collect()
        is_new, passes = bool(ledger.passes), ledger.passes_of_step()
        noop = None
        if passes and self.observer is None and self._can_defer(passes):
            noop = self.overflow.defer(passes, is_new=is_new)
            ledger.leave(passes)
        else:
            report = self._read(passes, is_new=is_new)
            if report is not None:
                ledger.leave(passes)
                self._skip(report, passes, is_fused=is_fused)
                return None
        if options is not None:
            options = replace(options, noop=noop)
        elif self._is_fused:
            copies = self.params.for_kernel() if self.params.weights else None
            options = ScaledStep(1.0, noop, copies) if copies or noop is not None else None
        copied = False
        try:
            with casts.off():
                result = self._step(options, noop, args, kwargs)
            copied = options is not None and bool(options.copies)
        finally:  # an error in the step or in a hook ends it too
            if is_fused and ledger.fused is not None:
                ledger.fused.free()
            self._after_step(copied=copied)
        return result

    def _read(self, passes: list[Pass], *, is_new: bool) -> overflows.SkippedStep | None:
        """Let the host decide whether to skip, and tell a watch before gradients are freed.

        A watch has seen what is not ``is_new``: gradients of a step that was skipped before.
        """
        if _runtime.capturing():
            self._check_capture(passes)
        report = self.overflow.read(passes, is_new=is_new)
        if self.observer is not None and is_new and self.can_skip():
            scale = float(passes[0 if report is None else report.place].scale)
            self.observer.stepped(self._optimizer(), report is not None, scale)
        return report

    def _check_both_captured(self, block: bool) -> None:
        counts = self.overflow.counts
        is_needed = self.can_skip() or self.params.weights or self.ledger.fused is not None
        if block is not counts.are_captured() and is_needed:
            captures.refuse_part(self._optimizer(), block=block)

    def _check_capture(self, passes: list[Pass]) -> None:
        self.overflow.counts.check_capture()
        watched = self.observer is not None
        if passes or watched:
            optimizer = self._optimizer()
            captures.refuse_read(optimizer, takes_flag=self._takes_flag, is_watched=watched)

    def _collect(self) -> None:
        """Bring gradients to where the step looks for them."""
        ledger = self.ledger
        ledger.collect()
        if ledger.passes:
            overflows.check_again(ledger)
        elif not self.use_masters:  # of O3, whose weights may have entries of a state_dict
            for record in ledger.records:
                record.reconcile()

    def _has_pre_hooks(self) -> bool:
        hooks = getattr(self._optimizer(), "_optimizer_step_pre_hooks", None)
        return bool(hooks or torch_optimizer._global_optimizer_pre_hooks)

    def _can_defer(self, passes: list[Pass]) -> bool:
        """Whether the kernels of the step can skip by themselves."""
        if not self._takes_flag:
            return False
        flags = [one.found_inf for one in passes]
        if not all([flag is not None and overflows.runs_behind(flag.device) for flag in flags]):
            return False
        return self._is_fused or not captures.may_leave_uninitialized(self._optimizer())

    def _step(
        self, options: ScaledStep | None, noop: torch.Tensor | None, args: Any, kwargs: Any
    ) -> Any:
        """The optimizer's own step, watched until one that the host decided changed a master."""
        check = self._step_check if noop is None else None
        watch = self.observer
        if (check or (self._model_check and not self.ledger.records)) and _runtime.capturing():
            captures.refuse_check(self._optimizer())
        if check is not None:
            check.begin()
        optimizer: Any = self._optimizer()
        given: dict[str, Any] = {}
        if options is not None:
            given["_scaled_step"] = options
        elif noop is not None:
            given = {"grad_scale": None, "found_inf": noop}
        self._is_stepping = True
        try:
            if optimizer is not None:
                vars(optimizer).update(given)
            result = self._inner_step(*args, **kwargs)
        finally:
            self._is_stepping = False
            for name in given if optimizer is not None else ():
                vars(optimizer).pop(name, None)
        if watch is not None and watch.fault is not None:
            check = None  # the watch has skipped the step
        if check is not None and check.end(self.training.properties.opt_level):
            self._step_check = None
        if self._model_check is not None and (self.ledger.records or self._model_check.end()):
            self._model_check = None
        return result

    def _refuse_step(self, *, has_closure: bool) -> None:
        if self._is_open():
            raise RuntimeError(
                "amp: step() was called inside the scale_loss block, where gradients are still "
                "scaled. Call it after the block."
            )
        if self.superseded:
            self.refuse_superseded()
        self.ledger.refuse_scaled_elsewhere()
        if self.ledger.is_captured is not None:
            self._check_both_captured(self.ledger.is_captured)
        if has_closure and self.can_skip():
            raise RuntimeError(
                "amp: step() was given a closure, but with dynamic loss scaling a step can be "
                "skipped after the closure ran. Use a static loss_scale (or O4, O5), or call "
                "backward before step()."
            )
        optimizer = self._optimizer()
        if self.use_masters and getattr(optimizer, "found_inf", None) is not None:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[union-attr]
            raise RuntimeError(
                "amp: torch's GradScaler cannot drive this optimizer at "
                f"{self.training.properties.opt_level}: it steps float32 masters, and the "
                "gradients are on the 16-bit model. Use amp.scale_loss(loss, optimizer), or O1 or "
                "O4."
            )

    def _step_with(self, closure: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        off = casts.off()

        def evaluate() -> Any:
            self.params.write()  # the optimizer may have moved the masters since
            with off.lifted():
                loss = closure()
            self.ledger.collect()
            return loss

        self.ledger.collect()
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        try:
            with off:
                result = self._step(None, None, (evaluate, *args[1:]), rest)
            self.overflow.read([])  # taken
        finally:
            self._after_step(copied=False)
        return result

    def before_inner_step(self, inner: Any, *, has_closure: bool) -> None:
        """Have a step of the optimizer inside of a wrapper skipped or refused, as the wrapper's."""
        if self._is_stepping:
            return
        self._refuse_step(has_closure=has_closure)
        if has_closure and self.use_masters:
            raise RuntimeError(
                f"amp: step(closure) of the {type(inner).__name__} inside of a "
                f"{type(self._optimizer()).__name__} was called. Its closure would run before the "
                "masters are written to the model. Call step(closure) of the object that was "
                "passed to amp.initialize, or pass the inner optimizer to amp.initialize."
            )
        self._collect()
        is_new, passes = bool(self.ledger.passes), self.ledger.passes_of_step()
        report = self._read(passes, is_new=is_new)
        self._inner_is_skipped = report is not None
        if report is None:
            return
        self._skip(report, passes, is_fused=False)
        for param in self.params.stepped:
            param.grad = None  # so that the step changes nothing

    def after_inner_step(self) -> None:
        """Write the masters to the model after a step of the optimizer inside of a wrapper."""
        if not self._is_stepping and not self._inner_is_skipped:
            self._after_step(copied=False)

    def _skip(self, report: overflows.SkippedStep, passes: list[Pass], *, is_fused: bool) -> None:
        self.overflow.log(report)
        # Let torch's schedulers count a skipped step as taken, on a wrapped optimizer too.
        optimizer: Any = self._optimizer()
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
        self.ledger.after_step()
        casts.forget_weights()
        if message is not None:
            raise RuntimeError(message)

    def _after_step(self, *, copied: bool) -> None:
        if copied:  # by the step itself
            self.params.record()
        elif self.params.weights:
            self.params.write()
        self.ledger.after_step()
        casts.forget_weights()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own, and the same for the model weights behind masters."""
        # Unscale first: if a delayed pass overflowed, its other optimizers must skip too.
        for ledger in self.ledger.with_co_owners() if self.training.shared else (self.ledger,):
            if ledger.scaled is not None:
                ledger.unscale_delayed(check=False)
        if self.ledger.passes and self.ledger.state is not State.OPEN:
            overflows.check_again(self.ledger)
        if self.params.weights and any([record.is_compiled for record in self.ledger.records]):
            self.params.reconcile()  # the forward will not do it
        self._replaced.inner["zero_grad"](*args, **kwargs)
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        self.ledger.clear(set_to_none=bool(set_to_none))

    def add_param_group(self, group: Any) -> None:
        """The optimizer's own; 16-bit weights in the new group get masters."""
        checks.check_groups(self._optimizer(), [group], "add_param_group")
        self._replaced.inner["add_param_group"](group)
        self.params.sync()

    # -- what old programs look at -------------------------------------------------------------

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """The 16-bit model weights that have masters."""
        self.params.sync()
        return list(self.params.weights)

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """The masters of :attr:`all_fp16_params`, in the same order."""
        self.params.sync()
        return list(self.params.tensors)

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """The tensors in the groups that are their own masters."""
        self.params.sync()
        return list(self.params.plain)


def state_of(optimizer: Any) -> OptimizerState | None:
    """Return amp's record of ``optimizer``, or ``None`` if it was never initialised."""
    state = getattr(optimizer, "_amp_stash", None)
    return state if isinstance(state, OptimizerState) else None
