"""What amp puts on an optimizer.

``OptimizerState`` is the optimizer's attribute ``_amp_stash``. All that amp knows of an optimizer
is there, so two trainings share nothing. Three methods are replaced on the instance: ``step``
(skips after an overflow, keeps masters and model equal), ``zero_grad`` (clears the 16-bit weights
too), ``add_param_group`` (gives new 16-bit weights masters). Two names that old programs call look
at the groups again. Where there are masters, ``_step_supports_amp_scaling`` makes torch's
GradScaler set its scale on the optimizer, so that the step can refuse it. A wrapper's inner
optimizer gets a step pre-hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from apex.amp import registry
from apex.amp.casting import state as casts
from apex.amp.gradients import overflow as overflows
from apex.amp.gradients.fused import FusedGradients
from apex.amp.gradients.ledger import Ledger, State
from apex.amp.gradients.overflow import Overflow
from apex.amp.gradients.parameters import Parameters
from apex.amp.gradients.step_check import StepCheck
from apex.amp.policy import HALF_TYPES
from apex.amp.replaced import Replaced
from apex.amp.training import Training

_PATCHED = ("step", "zero_grad", "add_param_group")
_OLD_HOOKS = ("_lazy_init_maybe_master_weights", "_amp_lazy_init")  # called by old programs
_MARK = "_step_supports_amp_scaling"


class OptimizerState:
    """amp's record of one optimizer.

    Args:
        optimizer: Anything with ``param_groups``, ``state``, ``step`` and ``zero_grad``.
        training: What the optimizer was initialised with.
        use_masters: Whether 16-bit weights get float32 masters.
        full: float32 values of the weights before they were rounded, by weight.

    Attributes:
        ledger: Its gradients.
        overflow: Its skipped steps.
        superseded: Whether its model went through another ``initialize`` without it.
        lazy_init_called: Read and written by old programs.
    """

    def __init__(
        self,
        optimizer: Any,
        training: Training,
        use_masters: bool,
        full: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        self.training = training
        self.use_masters = use_masters
        self.superseded = False
        self.lazy_init_called = True
        self._optimizer = weakref.ref(optimizer)
        params = Parameters(optimizer, use_masters, self._find_models_and_sharers)
        asked = training.fused_step or not getattr(optimizer, "materialize_master_grads", True)
        fused = FusedGradients(params) if asked and hasattr(optimizer, "step_scaled") else None
        self.ledger = Ledger(params, training, fused)
        self.overflow = Overflow(training.verbosity, training.max_skipped_steps)
        self._takes_options = hasattr(optimizer, "step_scaled")  # one of apex.optimizers
        self._takes_flag = self._takes_options or bool(getattr(optimizer, _MARK, False))
        # Until an optimizer was seen to step the masters it was given; those of apex.optimizers do.
        needs_check = use_masters and not self._takes_options
        self._step_check = StepCheck(optimizer, params) if needs_check else None
        self._is_stepping = False
        params.sync(full)
        training.add_ledger(self.ledger)
        attributes: dict[str, Any] = {"_amp_stash": self}
        attributes.update(dict.fromkeys(_OLD_HOOKS, params.sync))
        if use_masters:
            attributes[_MARK] = True
        methods = {name: getattr(self, name) for name in _PATCHED}
        self._replaced = Replaced(optimizer, methods, attributes)
        record = weakref.ref(self)
        self._replaced.watch_inner_steps(
            optimizer,
            lambda *of: None if (state := record()) is None else state._before_inner_step(*of),
        )
        registry.add(optimizer)

    def _find_models_and_sharers(self) -> None:
        self.training.find_shared()
        records, is_all = self.training.records_of(self.ledger.params.targets)
        self.ledger.records, self.ledger.belongs_to_models = records, is_all

    def _before_inner_step(self, inner: Any, has_closure: bool) -> None:
        """Have a step of the optimizer inside of a wrapper skipped or refused, as the wrapper's."""
        if self._is_stepping:
            return
        self._refuse_step(has_closure=has_closure)
        if self.use_masters:
            raise RuntimeError(
                f"amp: step() of the {type(inner).__name__} inside of a "
                f"{type(self._optimizer()).__name__} was called. It steps the float32 masters "
                "and does not copy them into the model. Call step() of the object that was passed "
                "to amp.initialize, or pass the inner optimizer to amp.initialize."
            )
        self.ledger.collect()
        overflows.check_again(self.ledger)
        passes, self.ledger.passes = self.ledger.passes, []
        report = self.overflow.read(passes)
        if report is None:
            self.overflow.note_taken()
            self.ledger.after_step()
            return
        self._skip(report, passes, is_fused=False)
        for param in self.ledger.params.stepped:
            param.grad = None  # so that the step changes nothing

    def parts(self) -> list[Any]:
        """The objects that make up this record."""
        parts = [self, self.training, self.ledger, self.ledger.params, self.ledger.fused]
        return [part for part in (*parts, self.overflow, self._replaced) if part is not None]

    def detach(self) -> None:
        """Give the optimizer its own methods back, and the model's weights in its groups."""
        optimizer = self._optimizer()
        registry.discard(optimizer)
        if optimizer is None or not self._replaced.is_on:
            return
        self.ledger.unscale_delayed(check=False)
        self.ledger.params.sync()
        self._replaced.take_off(optimizer)
        self.ledger.params.restore()

    # -- what scale_loss, clipping and readers need --------------------------------------------

    def refuse_superseded(self) -> None:
        """Raise if the model was initialised again without this optimizer."""
        if self.superseded:
            raise RuntimeError(
                "amp: the model of this optimizer went through another amp.initialize, which made "
                "new masters of its weights. Pass both optimizers in one call: "
                "amp.initialize(model, [first, second], ...)."
            )

    def _is_open(self) -> bool:
        """Whether a block is open, of this optimizer or of one that shares a parameter."""
        return any(ledger.state is State.OPEN for ledger in self.ledger.with_sharers())

    def collect(self) -> None:
        """Bring every gradient to where the optimizer looks for it, unscaled."""
        if self._is_open():
            raise RuntimeError(
                "amp: gradients are still scaled inside the scale_loss block. Clip after it."
            )
        self.ledger.collect()

    def clip_fused(self, max_norm: float, *, error_if_nonfinite: bool) -> torch.Tensor | None:
        """Leave clipping to a fused step; ``None`` where gradients are not kept scaled for one."""
        fused = self.ledger.fused
        if fused is None or not fused.active or self.ledger.state is not State.SCALED:
            return None
        return fused.clip(max_norm, error_if_nonfinite=error_if_nonfinite)

    def materialise(self) -> None:
        """Let a reader find gradients as they will be stepped; inside a block they are scaled."""
        self.ledger.params.pairs.match_requires_grad()
        if self.ledger.fused is not None and self.ledger.fused.active:
            self.ledger.unscale_delayed()

    # -- the step ------------------------------------------------------------------------------

    def can_skip(self) -> bool:
        """Whether any step of this optimizer could be skipped."""
        return any(scaler.dynamic for scaler in self.training.loss_scalers)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, unless a pass since the last one was not finite."""
        closure = args[0] if args else kwargs.get("closure")
        self._refuse_step(has_closure=closure is not None)
        self._refuse_scaler()
        self.overflow.log_reports()
        if closure is not None:
            return self._step_with(closure, args, kwargs)
        ledger = self.ledger
        if self._has_pre_hooks():  # they see gradients unscaled
            ledger.unscale_delayed()
        options = ledger.step_options()
        is_fused = bool(options)
        if not is_fused:
            ledger.collect()
            overflows.check_again(ledger)
            if self._takes_options and ledger.params.pairs:
                options["copies"] = ledger.params.pairs.for_kernel()
        passes, ledger.passes = ledger.passes, []
        if self._can_defer(passes):
            options["noop"] = self.overflow.defer(passes)
        else:
            report = self.overflow.read(passes)
            if report is not None:
                self._skip(report, passes, is_fused=is_fused)
                return None
            self.overflow.note_taken()
        copied = False
        try:
            with casts.off():
                result = self._inner_step(options, args, kwargs)
            copied = bool(options.get("copies"))
        finally:  # an error in the step or in a hook ends it too
            if is_fused and ledger.fused is not None:
                ledger.fused.free()
            self._after_step(copied=copied)
        return result

    def _has_pre_hooks(self) -> bool:
        hooks = getattr(self._optimizer(), "_optimizer_step_pre_hooks", None)
        return bool(hooks or torch_optimizer._global_optimizer_pre_hooks)

    def _can_defer(self, passes: list[Any]) -> bool:
        """Whether the kernels of the step can skip by themselves."""
        if not passes or not self._takes_flag:
            return False
        return all(overflows.runs_behind(one.found_inf.device) for one in passes)

    @contextmanager
    def _stepping(self, *, deferred: bool) -> Iterator[None]:
        """The optimizer's own step, watched until one that the host decided changed a master."""
        check = self._step_check if not deferred else None
        if check is not None:
            check.begin()
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
        if check is not None and check.end(self.training.properties.opt_level):
            self._step_check = None

    def _inner_step(self, options: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """The optimizer's own step, given what gradients are multiplied by, or a flag to skip."""
        optimizer = self._optimizer()
        step = self._replaced.inner["step"]
        with self._stepping(deferred="noop" in options):
            if not options or optimizer is None:
                return step(*args, **kwargs)
            if self._takes_options:
                optimizer._scaled_step = options
                try:
                    return step(*args, **kwargs)
                finally:
                    vars(optimizer).pop("_scaled_step", None)
            optimizer.grad_scale, optimizer.found_inf = None, options["noop"]
            try:
                return step(*args, **kwargs)
            finally:
                del optimizer.grad_scale, optimizer.found_inf

    def _refuse_scaler(self) -> None:
        """Raise if torch's GradScaler drives a step that goes through masters."""
        optimizer = self._optimizer()
        if not self.use_masters or getattr(optimizer, "found_inf", None) is None:
            return
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[union-attr]
        raise RuntimeError(
            "amp: torch's GradScaler cannot drive this optimizer at "
            f"{self.training.properties.opt_level}: it steps float32 masters, and the gradients "
            "are on the 16-bit model. Use amp.scale_loss(loss, optimizer), or O1 or O4."
        )

    def _refuse_step(self, *, has_closure: bool) -> None:
        if self._is_open():
            raise RuntimeError(
                "amp: step() was called inside the scale_loss block, where gradients are still "
                "scaled. Call it after the block."
            )
        self.refuse_superseded()
        if has_closure and self.can_skip():
            raise RuntimeError(
                "amp: step() was given a closure, but with dynamic loss scaling a step can be "
                "skipped after the closure ran. Use a static loss_scale (or O4, O5), or call "
                "backward before step()."
            )

    def _step_with(self, closure: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        off = casts.off()

        def evaluate() -> Any:
            if self.ledger.params.pairs:  # the optimizer may have moved the masters since
                self.ledger.params.pairs.write()
            with off.lifted():
                loss = closure()
            self.ledger.collect()
            return loss

        self.ledger.collect()
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        try:
            with off, self._stepping(deferred=False):
                result = self._replaced.inner["step"](evaluate, *args[1:], **rest)
            self.overflow.note_taken()
        finally:
            self._after_step(copied=False)
        return result

    def _skip(self, report: overflows.Report, passes: list[Any], *, is_fused: bool) -> None:
        self.overflow.log(report)
        self._count_as_called()
        message = None
        if report.skipped >= self.overflow.limit:
            loss = next(one.loss for one in passes if one.index == report.loss_id)
            message = overflows.describe_dead_training(self.ledger, report, loss)
        if is_fused and self.ledger.fused is not None:
            self.ledger.fused.free()
        self.ledger.after_step()
        casts.forget_weights()
        if message is not None:
            raise RuntimeError(message)

    def _count_as_called(self) -> None:
        """Let torch's schedulers count a skipped step as taken, on a wrapped optimizer too."""
        optimizer: Any = self._optimizer()
        for one in () if optimizer is None else (optimizer, *vars(optimizer).values()):
            if one is optimizer or isinstance(one, torch.optim.Optimizer):
                setattr(one, "_opt_called", True)  # noqa: B010  # torch's types have no such name

    def _after_step(self, *, copied: bool) -> None:
        pairs = self.ledger.params.pairs
        if copied:  # by the step itself
            pairs.note_written()
        elif pairs:
            pairs.write()
        self.ledger.after_step()
        casts.forget_weights()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own, and the same for the model weights behind masters."""
        # Unscale first: if a delayed pass overflowed, its other optimizers must skip too.
        for ledger in self.ledger.with_sharers():
            ledger.unscale_delayed(check=False)
        if self.ledger.state is not State.OPEN:
            overflows.check_again(self.ledger)
        self._replaced.inner["zero_grad"](*args, **kwargs)
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        self.ledger.clear(set_to_none=bool(set_to_none))

    def add_param_group(self, group: Any) -> None:
        """The optimizer's own; 16-bit weights in the new group get masters."""
        self._replaced.inner["add_param_group"](group)
        self.ledger.params.sync()

    # -- what old programs look at -------------------------------------------------------------

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """The 16-bit model weights that have masters."""
        self.ledger.params.sync()
        return list(self.ledger.params.pairs.weights)

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """The masters of :attr:`all_fp16_params`, in the same order."""
        self.ledger.params.sync()
        return list(self.ledger.params.pairs.tensors)

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """The tensors in the groups that are their own masters."""
        self.ledger.params.sync()
        return list(self.ledger.params.plain)


# -- optimizers and their states ---------------------------------------------------------------


def state_of(optimizer: Any) -> OptimizerState | None:
    """Return amp's record of ``optimizer``, or ``None`` if it was never initialised."""
    state = getattr(optimizer, "_amp_stash", None)
    return state if isinstance(state, OptimizerState) else None


def states() -> list[OptimizerState]:
    """The records of all optimizers that are managed."""
    return [state for optimizer in registry.managed() if (state := state_of(optimizer)) is not None]


def halves_of(optimizer: Any) -> list[torch.Tensor]:
    """The weights that amp has cast to 16 bits and ``optimizer`` steps itself, without masters."""
    state = state_of(optimizer)
    if state is None or state.training.properties.cast_model_type not in HALF_TYPES:
        return []
    return [param for param in state.ledger.params.in_groups() if param.dtype in HALF_TYPES]


def is_over(training: Training) -> bool:
    """Whether none of its optimizers, or of its models where it has none, is left to amp."""
    if not training.ledgers():
        return not training.has_models()
    return not any(state.training is training for state in states())
