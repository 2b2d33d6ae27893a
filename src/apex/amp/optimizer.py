"""What amp does to an optimizer: masters in its groups, and a ``step`` that can decline.

``OptimizerState`` hangs on the optimizer as ``_amp_stash``; all that amp knows of an optimizer
is there, so two trainings never meet. Three methods are replaced on the instance, as bound
methods: ``step`` (skips, keeps masters and model equal), ``zero_grad`` (clears the 16-bit
weights too), ``add_param_group`` (gives new 16-bit weights masters).

One pass of ``scale_loss`` goes like this. On entry the gradients are set aside, so that backward
leaves only this pass's, scaled. On exit those are divided by the scale, checked, and added to
what was set aside. Gradients are thus unscaled whenever user code outside of a block sees them,
whatever mix of losses, scales and accumulation produced them. A pass with ``delay_unscale``
leaves them scaled; the next pass, or the step, settles that debt at the scale that made it.

A gradient a reader finds on a 16-bit *model* weight after a block is still scaled, as in the
original: the ones to read and clip are those of ``amp.master_params(optimizer)``.
"""

from __future__ import annotations

import functools
import logging
import operator
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from apex.amp import _speech
from apex.amp.casting import state as casts
from apex.amp.casting.models import Master, leftovers, masters
from apex.amp.fused_step import (
    Marks,
    Measured,
    Owed,
    fuses,
    inverse,
    measured_scaled,
    takes,
    unscale_and_measure,
)
from apex.amp.lag import Reports, runs_behind
from apex.amp.passes import Aside, Debt, Pass, accumulate, add_back, stored_values, unshared
from apex.amp.policy import HALF_TYPES
from apex.amp.scaler import LossScaler, unscale_
from apex.amp.twins import Twins

if TYPE_CHECKING:
    from apex.amp.training import Training

_PATCHED = ("step", "zero_grad", "add_param_group")
_OLD_HOOKS = ("_lazy_init_maybe_master_weights", "_amp_lazy_init")  # called by programs of old


class _Entry(NamedTuple):
    """One tensor in the optimizer's groups.

    Attributes:
        param: What the optimizer steps: a master, or the model's own weight.
        target: What backward writes gradients to: always the model's weight.
        master: The master, where ``param`` is one.
    """

    param: torch.Tensor
    target: torch.Tensor
    master: Master | None


class OptimizerState:
    """amp's record of one optimizer.

    Args:
        optimizer: Anything with ``param_groups``, ``state``, ``step`` and ``zero_grad``.
        training: What the optimizer was initialised with.
        use_masters: Whether 16-bit weights get float32 masters.
        full: float32 values of the weights before they were rounded, by weight.
    """

    def __init__(
        self,
        optimizer: Any,
        training: Training,
        use_masters: bool,
        full: dict[torch.nn.Parameter, torch.Tensor],
    ) -> None:
        self.training = training
        self.use_masters = use_masters
        self.passes: list[Pass] = []
        self.skipped = 0  # steps in a row
        self.lazy_init_called = True  # read and written by programs of old
        self.is_open = False  # inside a scale_loss block
        self._optimizer = weakref.ref(optimizer)
        self._entries: list[_Entry] = []
        self._params: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._plain: list[torch.Tensor] = []
        self._twins = Twins([])
        self._debt: Debt | None = None
        self._unscaled: Aside = {}  # what had accumulated before the debt was made
        self._aside: Aside = {}
        self._stepped_once = False
        self._landed: bool | torch.Tensor = False  # whether the last step was taken
        self._reports = Reports()  # of steps that a device decided
        self._takes_flag = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self.takes_scaled = hasattr(optimizer, "step_scaled")  # one of apex.optimizers
        self._measured: Measured | None = None
        self._clip: Owed | None = None  # by amp.clip_grad_norm_, for the step
        self._owed: Owed | None = None  # by the last step
        self._kept: Marks | None = None  # of gradients that stay scaled until the step
        self._warned = False
        self._is_attached = True
        self._sync(full)
        self._patch(optimizer)
        optimizer._amp_stash = self

    # -- the optimizer's methods ---------------------------------------------------------------

    def _patch(self, optimizer: Any) -> None:
        self._inner = {name: getattr(optimizer, name) for name in _PATCHED}
        self._was_own = {name for name in _PATCHED if name in vars(optimizer)}
        for name in _PATCHED:
            setattr(optimizer, name, types.MethodType(self._replacement(name), optimizer))
        for name in _OLD_HOOKS:  # masters exist already: what is left to do is to look for new ones
            setattr(optimizer, name, self._look_again)
        if self.use_masters:
            # torch's GradScaler unscales what is in the groups, where masters have no gradients
            # yet. With this mark it calls step() and says that it is there: see _refuse_scaler.
            self._inner["mark"] = vars(optimizer).get("_step_supports_amp_scaling")
            optimizer._step_supports_amp_scaling = True

    def _replacement(self, name: str) -> Any:
        """A function in the place of the optimizer's ``name``, marked like the original.

        The marks are those by which torch's schedulers know a step that they have wrapped.
        """
        inner = self._inner[name]

        @functools.wraps(getattr(inner, "__func__", inner))
        def replacement(_: Any, *args: Any, **kwargs: Any) -> Any:
            # a scheduler may still hold this after the optimizer was released
            return (getattr(self, name) if self._is_attached else inner)(*args, **kwargs)

        return replacement

    def _unpatch(self, optimizer: Any) -> None:
        for name in _PATCHED:
            if not isinstance(vars(optimizer).get(name), types.MethodType):
                continue  # wrapped by somebody since: what they hold passes through now
            if name in self._was_own:
                setattr(optimizer, name, self._inner[name])
            else:
                delattr(optimizer, name)
        for name in ("_amp_stash", *_OLD_HOOKS):
            delattr(optimizer, name)
        if self.use_masters:
            del optimizer._step_supports_amp_scaling
            if self._inner["mark"] is not None:
                optimizer._step_supports_amp_scaling = self._inner["mark"]

    def _look_again(self) -> None:
        self._sync()

    def detach(self) -> None:
        """Give the optimizer its own methods back, and the model's weights in its groups."""
        optimizer = self._optimizer()
        if optimizer is None or not self._is_attached:
            return
        if not self.is_open:
            self.settle_debt(check=False)
            clip, self._clip = self._clip, None
            if clip is not None and clip.marks is not None:
                clip.apply(clip.marks.unchanged(self._params))
            self._pay()
        self._sync()
        self._is_attached = False
        self._unpatch(optimizer)
        weights = {id(e.param): e.target for e in self._entries if e.master is not None}
        for group in optimizer.param_groups:
            group["params"][:] = [weights.get(id(param), param) for param in group["params"]]
        for entry in self._entries:
            if entry.master is not None and entry.param in optimizer.state:
                optimizer.state[entry.target] = optimizer.state.pop(entry.param)
        self._remember([])

    def params(self) -> Iterator[torch.Tensor]:
        """Every tensor in the optimizer's groups."""
        optimizer = self._optimizer()
        for group in () if optimizer is None else optimizer.param_groups:
            yield from group["params"]

    def _sync(self, full: dict[torch.nn.Parameter, torch.Tensor] | None = None) -> list[_Entry]:
        """The entries for what is in the groups now, with masters for new 16-bit weights."""
        optimizer = self._optimizer()
        now: list[torch.Tensor] = []
        for group in () if optimizer is None else optimizer.param_groups:
            now += group["params"]
        if len(now) == len(self._params) and all(map(operator.is_, now, self._params)):
            return self._entries
        known = {id(entry.param): entry for entry in self._entries}
        known.update({id(entry.target): entry for entry in self._entries})
        # a master that had been taken out of its group may come back
        owners = {id(m.tensor): weight for weight, m in masters.items()} if self.use_masters else {}
        entries = []
        for group in () if optimizer is None else optimizer.param_groups:
            if not isinstance(group["params"], list):
                group["params"] = list(group["params"])
            params = group["params"]
            for index, param in enumerate(params):
                weight = owners.get(id(param), param)
                entry = known.get(id(param)) or self._entry(optimizer, weight, full or {})
                params[index] = entry.param
                entries.append(entry)
        self._remember(entries)
        self.training.find_shared()
        return entries

    def _remember(self, entries: list[_Entry]) -> None:
        """Keep the entries, and in columns what every step goes through."""
        self._entries = entries
        self._params = [entry.param for entry in entries]
        self._targets = [entry.target for entry in entries]
        self._plain = [entry.param for entry in entries if entry.master is None]
        self._twins = Twins(
            [(e.target, e.param, e.master) for e in entries if e.master is not None]
        )

    @torch.no_grad()
    def _entry(
        self, optimizer: Any, param: Any, full: dict[torch.nn.Parameter, torch.Tensor]
    ) -> _Entry:
        if not self.use_masters or param.dtype not in HALF_TYPES:
            return _Entry(param, param, None)
        master = masters.get(param)
        if master is None:
            value = full.get(param)
            wide = param.float() if value is None else value.clone()
            master = Master(wide.detach(), param._version)
            masters[param] = master
        tensor: torch.Tensor = master.tensor.requires_grad_()
        if param in optimizer.state:
            state = optimizer.state[tensor] = optimizer.state.pop(param)
            own = state.pop("master_param", None) if isinstance(state, dict) else None
            if own is not None:  # the optimizer kept masters itself: one is enough
                tensor.copy_(own)
        if param.grad is not None:  # accumulated before amp came in: unscaled
            tensor.grad, param.grad = param.grad.float(), None
        return _Entry(tensor, param, master)

    # -- one pass ------------------------------------------------------------------------------

    def open(self) -> Aside:
        """Set every gradient aside, so that backward leaves only its own."""
        aside: Aside = {}
        self.apply_clip()
        self._pay()
        self._measured = None
        entries = self._sync()
        grads = [target.grad for target in self._targets]
        for (_, target, master), grad in zip(entries, grads, strict=True):
            if grad is not None:
                if master is None or grad is not master.left:  # else in the master's already
                    aside[target] = unshared(grad)
                target.grad = None
        self._twins.forget_left()
        if self.passes and not aside and self._debt is None:
            self._forget_passes_without_gradients()
        self.is_open = True
        self._aside = aside
        return aside

    def _forget_passes_without_gradients(self) -> None:
        """Let an overflow go with its gradients, where the program has cleared those itself."""
        if not self._twins.has_grads():
            self.passes.clear()

    def abandon(self, aside: Aside) -> None:
        """Put every gradient back as :meth:`open` found it."""
        self.is_open = False
        for entry in self._entries:
            entry.target.grad = aside.get(entry.target)

    def close_delayed(self, aside: Aside, debt: Debt) -> None:
        """End a pass whose gradients stay scaled until the next pass or the step."""
        self.is_open = False
        if self._debt is None:
            self._debt, self._unscaled = debt, aside
        else:  # of the same kind, or it had been settled
            add_back(aside)
        if self._debt.kept:
            self._kept = Marks(self._targets)

    @torch.no_grad()
    def close(self, aside: Aside, scale: torch.Tensor | float, done: set[int] | None) -> Any:
        """Unscale what backward left and add what was set aside.

        Args:
            aside: What :meth:`open` returned.
            scale: The scale the pass began with.
            done: ids of tensors that another optimizer of this pass has dealt with; extended.
                ``None`` when there is no other.

        Returns:
            The non-finite flag, see :func:`apex.amp.scaler.unscale_`.
        """
        self.is_open = False
        if self._debt is not None:
            add_back(aside)
            aside, self._debt, self._unscaled = self._unscaled, None, {}
        plain, twins = self._plain, self._twins
        if done is not None:
            plain = [tensor for tensor in plain if id(tensor) not in done]
            twins = twins.without(done)
            done.update(id(entry.target) for entry in self._entries)
        grads = [weight.grad for weight in plain if weight.grad is not None]
        if any(grad.is_sparse for grad in grads):
            grads = [_coalesced(weight) for weight in plain if weight.grad is not None]
        halves = [weight.grad for weight in twins.weights if weight.grad is not None]
        in_one_pass = takes(grads + halves)
        if twins:
            leftovers.holders.add(self)
        wide, widened = twins.widen(self.training.sharing, empty=in_one_pass)
        if in_one_pass:
            found, squares = unscale_and_measure(grads + halves, grads + wide, scale)
        else:
            found, squares = unscale_(grads + wide, scale), None
        accumulate(widened)
        if aside:
            self._return(aside)
        elif squares is not None and done is None and not widened:
            self._measured = Measured(squares, Marks(self._params))
        return found

    def _return(self, aside: Aside) -> None:
        """Add unscaled gradients that were set aside: to the master, where there is one."""
        for entry in self._entries:
            if entry.master is not None and entry.target in aside:
                accumulate([(entry.param, aside.pop(entry.target).float())])
        add_back(aside)

    def settle_debt(self, unless: Debt | None = None, *, check: bool = True) -> None:
        """Unscale what passes with ``delay_unscale`` left, at the scale that made it.

        Args:
            unless: A pass about to begin: nothing is done if it may add to the same gradients.
            check: Whether to raise where somebody has changed gradients that stayed scaled.
        """
        debt = self._debt
        if debt is None:
            return
        if check:
            self._check_kept()
        # a second pass must not add up in 16 bits what masters would add up in float32
        fits = unless is not None and debt.matches(unless) and not (debt.kept and self._twins)
        if not fits:
            clip, self._clip = self._clip, None
            self._kept = None
            debt.settle([{} for _ in debt.states])
            if clip is not None:
                clip.apply(param.grad for param in self._params)

    def record(self, scaler: LossScaler, index: int, found: Any, loss: torch.Tensor) -> None:
        """Note a finished pass for the step to look at."""
        if found is not None:
            self.passes.append(Pass(scaler, index, found, loss.detach()))

    # -- the step --------------------------------------------------------------------------------

    def drop_left(self) -> None:
        """Clear the scaled gradients left on 16-bit weights.

        Called as the next forward begins: their time for being read is over, a backward outside
        of ``scale_loss`` must not add to them, and they are a copy's worth of memory.
        """
        self._twins.drop_left()

    def can_skip(self) -> bool:
        """Whether any step of this optimizer could be skipped."""
        return any(scaler.dynamic for scaler in self.training.loss_scalers)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, unless a pass since the last one was not finite."""
        if self.is_open:
            raise RuntimeError(
                "amp: step() was called inside the scale_loss block, where gradients are still "
                "scaled. Call it after the block."
            )
        self._refuse_scaler()
        self._hear()
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            return self._step_with(closure, args, kwargs)
        how = self._scaled_step()
        if how is None:
            self.collect()
            how = {}
        self._let_step_copy(how)
        if self._can_lag():
            self._let_device_decide(how)
        else:
            bad = self._overflowed()
            if bad is not None:
                self._skip(bad)
                return None
            self._landed, self.skipped = True, 0
        with casts.off():
            result = self._call(how, args, kwargs)
        if "factor" in how and self._plain:
            self._owed = Owed(how["factor"], Marks(self._plain))
        self._after_step(copied="copies" in how)
        return result

    def _call(self, how: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """The optimizer's own step, told to multiply gradients or to heed a flag."""
        optimizer = self._optimizer()
        if not how or optimizer is None:
            return self._inner["step"](*args, **kwargs)
        if self.takes_scaled:
            optimizer._scaled_step = how
            try:
                return self._inner["step"](*args, **kwargs)
            finally:
                vars(optimizer).pop("_scaled_step", None)
        optimizer.grad_scale, optimizer.found_inf = None, how["noop"]
        try:
            return self._inner["step"](*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    # -- gradients that stay scaled, and clipping factors that wait ------------------------------

    def keeps_scaled(self, aside: Aside) -> bool:
        """Whether a pass of this optimizer alone is to leave its gradients scaled until the step.

        Asked for by ``initialize(fused_step=True)`` or by the optimizer itself, and done where its
        kernels run: elsewhere nothing is gained.
        """
        optimizer = self._optimizer()
        asked = self.training.fused_step or not getattr(optimizer, "materialize_master_grads", True)
        if not (asked and self.takes_scaled) or self.training.sharing:
            return False
        if (aside and self._debt is None) or (self._debt is not None and not self._debt.kept):
            return False
        if self._twins.has_grads():
            return False
        return takes([e.target.grad for e in self._entries if e.target.grad is not None])

    def measure(self) -> torch.Tensor | None:
        """The norm of all gradients, if one pass made them and none has changed since.

        Returns:
            float32, 0-dim; ``None`` where it has to be computed from the gradients.
        """
        self._pay()
        if self._clip is not None:
            return None
        debt = self._debt
        if debt is not None and debt.kept and not self._unscaled:
            self._check_kept()
            if self._measured is None:
                self._measured = measured_scaled(debt, self._scaled_grads())
            return self._measured.norm
        if debt is not None or self._measured is None or self._measured.marks is None:
            return None
        if self._twins.has_more() or not self._measured.marks.hold(self._params):
            return None
        return self._measured.norm

    def clip(self, coefficient: torch.Tensor) -> bool:
        """Let the next step multiply gradients by ``coefficient``; say whether it can."""
        if not self.takes_scaled or self._measured is None or self.training.sharing:
            return False
        self._clip = Owed(coefficient, self._measured.marks)
        return True

    def apply_clip(self) -> None:
        """Multiply the gradients by the factor that was to wait for the step."""
        clip, self._clip = self._clip, None
        if clip is None:
            return
        if self._debt is not None:
            clip.apply(self._scaled_grads().values())
            self._kept = Marks(self._targets)
        else:
            clip.check(self._params)
            clip.apply(param.grad for param in self._params)

    def materialise(self) -> None:
        """Let a reader find gradients as they will be stepped; inside a block they are scaled."""
        if self.is_open:
            return
        if self._debt is not None and self._debt.kept:
            self.settle_debt()
        self.apply_clip()
        self._pay()

    def _pay(self) -> None:
        """Multiply gradients by the factor that the last step has applied in registers alone."""
        owed, self._owed = self._owed, None
        if owed is not None and owed.marks is not None:
            owed.apply(owed.marks.unchanged(self._plain))

    def _check_kept(self) -> None:
        """Raise if somebody has changed gradients that were to stay scaled until the step."""
        if self._kept is not None and not self._kept.hold(self._targets, or_gone=True):
            raise RuntimeError(
                "amp: gradients were changed while they were scaled: with fused_step=True they are "
                "until the step. Call every backward in scale_loss, clip with amp.clip_grad_norm_, "
                "and call list(amp.master_params(optimizer)), which unscales them, before changing "
                "them in another way."
            )

    def _let_step_copy(self, how: dict[str, Any]) -> None:
        """Have the step's kernel write 16-bit weights too, where it will step all of them."""
        twins = self._twins
        if not (twins and self.takes_scaled and "copies" not in how):
            return
        if not fuses(twins.weights[0].device) or not twins.has_all_grads():
            return
        if all(type(weight.data) is torch.Tensor for weight in twins.weights):
            how["copies"] = dict(zip(twins.tensors, twins.weights, strict=True))

    def _scaled_grads(self) -> dict[torch.Tensor, torch.Tensor]:
        """What backward left, by what the optimizer steps."""
        pairs = [(weight, weight.grad) for weight in self._plain]
        twins = self._twins
        pairs += [(t, w.grad) for t, w in zip(twins.tensors, twins.weights, strict=True)]
        return {param: grad for param, grad in pairs if grad is not None}

    def _scaled_step(self) -> dict[str, Any] | None:
        """Arguments for a step on gradients as they are, or ``None`` if they must be collected."""
        debt = self._debt
        clip = self._clip
        if debt is None:
            if clip is None:
                return None
            self._clip = None
            self.collect()
            clip.check(self._params)
            return {"factor": clip.factor}
        if not debt.kept or self._unscaled or self._twins.has_grads():
            return None
        self._sync()
        self._check_kept()
        self._debt = self._clip = self._kept = None
        grads = self._scaled_grads()
        measured, self._measured = self._measured, None
        if isinstance(debt.scale, torch.Tensor):
            if measured is None:
                measured = measured_scaled(debt, grads)
            self.record(debt.scaler, debt.index, measured.found, debt.loss)
            debt.scaler.finish_pass(measured.found)
        factor = inverse(debt.scale)
        if clip is not None:
            factor = clip.factor * factor
        self._twins.refresh(every=not self._stepped_once)
        copies = self._twins.leave()
        leftovers.holders.add(self)
        return {"factor": factor, "grads": grads, "copies": copies}

    # -- steps on a device that the host does not wait for ---------------------------------------

    @property
    def landed(self) -> bool:
        """Whether the last step was taken; waits for a device that decided it."""
        if isinstance(self._landed, torch.Tensor):
            self._landed = False if self._landed.is_meta else bool(self._landed)
        return self._landed

    def _can_lag(self) -> bool:
        """Whether the kernels of the step can skip by themselves, so that nobody has to wait."""
        if not self.passes or not self._takes_flag:
            return False
        return all(runs_behind(done.found.device) for done in self.passes)

    def _let_device_decide(self, how: dict[str, Any]) -> None:
        """Hand the flags of the passes to the step, and send for them."""
        passes, self.passes = self.passes, []
        noop = self._reports.order(passes)
        how["noop"] = noop
        self._landed = landed = noop == 0
        for done in passes:
            if done.epoch == done.scaler._epoch:
                done.scaler.count_step(landed)

    def _hear(self) -> None:
        """Speak of steps that a device has skipped, as far as that is known by now.

        Raises:
            RuntimeError: Too many in a row.
        """
        for report in self._reports.arrived():
            self.skipped = report.skipped
            if not report.skipped:
                continue
            self._say_skipped(report.loss_id, report.scale)
            if self.skipped >= self.training.max_skipped_steps:
                raise RuntimeError(
                    f"amp: {self.skipped} steps in a row were skipped because of non-finite "
                    f"gradients; the loss scale is now {report.scale}. (The device told so after "
                    "the step; initialize(max_skipped_steps=...) sets the limit.)"
                )

    def _refuse_scaler(self) -> None:
        """Raise if torch's GradScaler drives a step that goes through masters."""
        optimizer = self._optimizer()
        if not self.use_masters or getattr(optimizer, "found_inf", None) is None:
            return
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[union-attr]
        raise RuntimeError(
            f"amp: torch's GradScaler cannot drive this optimizer at "
            f"{self.training.properties.opt_level}: the gradients are the 16-bit model's, the "
            "weights float32 masters. Use `with amp.scale_loss(loss, optimizer) as scaled_loss: "
            "scaled_loss.backward()` and optimizer.step() instead, or O1 or O4 with GradScaler."
        )

    def _step_with(self, closure: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.can_skip():
            raise RuntimeError(
                "amp: step() was given a closure, but with dynamic loss scaling a step can be "
                "skipped after the closure ran. Use a static loss_scale (or O4, O5), or call "
                "backward before step()."
            )
        off = casts.off()

        def evaluate() -> Any:
            if self._twins:  # the optimizer may have moved the masters since
                self._twins.write()
            with off.lifted():
                loss = closure()
            self.collect()
            return loss

        self.collect()
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        with off:
            result = self._inner["step"](evaluate, *args[1:], **rest)
        self._landed, self.skipped = True, 0
        self._after_step()
        return result

    def collect(self) -> None:
        """Bring every gradient to where the optimizer looks for it, unscaled.

        Settles what delayed passes left, takes over what others wrote into 16-bit weights, and
        hands the gradients of a backward outside of ``scale_loss`` to the masters.
        """
        self.settle_debt()
        self.apply_clip()
        self._pay()
        self._sync()
        if not self._twins:
            return
        self._twins.refresh(every=not self._stepped_once)
        if self._twins.take_over() and not self._warned:
            self._warned = True
            warnings.warn(
                "amp: gradients of 16-bit model weights were changed after scale_loss (by "
                "clipping, or by another backward of the same forward?). That has no effect: "
                "the optimizer steps the float32 masters. Use amp.clip_grad_norm_(optimizer, "
                "max_norm), or clip amp.master_params(optimizer); call every backward in "
                "scale_loss.",
                stacklevel=4,
            )
        leftovers.holders.add(self)

    def _overflowed(self) -> tuple[Pass, float] | None:
        """The first pass that was not finite, with its scaler's scale now; one host read.

        Counts the step on the scalers of the passes when there is none.
        """
        passes, self.passes = self.passes, []
        if not passes:
            return None
        device = passes[0].scaler._state.device
        values = [value for done in passes for value in (done.found, done.scaler._state[0])]
        flags = torch.stack([value.to(device, non_blocking=True) for value in values]).tolist()
        for index, done in enumerate(passes):
            if flags[2 * index]:
                return done, flags[2 * index + 1]
        for done in passes:
            if done.epoch == done.scaler._epoch:
                done.scaler.count_step()
        return None

    def _skip(self, bad: tuple[Pass, float]) -> None:
        done, scale = bad
        self.skipped += 1
        self._landed = False
        self._measured = self._clip = None
        self._say_skipped(done.index, scale)
        self._count_as_called()
        message = None
        if self.skipped >= self.training.max_skipped_steps:
            message = self._diagnosis(done, scale)
        self._free_master_grads()
        casts.forget_weights()
        if message is not None:
            raise RuntimeError(message)

    def _say_skipped(self, index: int, scale: float) -> None:
        if self.training.verbosity > 0:
            _speech.say(
                f"Gradient overflow.  Skipping step, loss scaler {index} "
                f"reducing loss scale to {scale}",
                logging.WARNING,
            )

    def _count_as_called(self) -> None:
        """Let torch's schedulers count a skipped step as taken, on a wrapped optimizer too."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        optimizer._opt_called = True
        for inner in vars(optimizer).values():
            if isinstance(inner, torch.optim.Optimizer):
                inner._opt_called = True  # type: ignore[attr-defined]

    def _diagnosis(self, done: Pass, scale: float) -> str:
        name = "unknown"
        for entry in self._entries:
            grad = entry.param.grad
            if grad is not None and not bool(torch.isfinite(stored_values(grad)).all()):
                name = self.training.name_of(entry.target)
                break
        finite = bool(torch.isfinite(done.loss).all())
        cause = (
            "The loss itself was finite: gradients overflow even at this scale, or backward "
            "produces nan."
            if finite
            else "The loss itself was not finite, so scaling is not the cause: look at the data, "
            "the learning rate and the forward."
        )
        return (
            f"amp: {self.skipped} steps in a row were skipped because of non-finite gradients; the "
            f"first non-finite gradient is that of parameter {name}; the loss scale is now "
            f"{scale}. {cause} (initialize(max_skipped_steps=...) sets the limit.)"
        )

    def _after_step(self, *, copied: bool = False) -> None:
        self._stepped_once = True
        self._measured = None
        if copied:  # by the step itself
            self._twins.note_written()
        elif self._twins:
            self._twins.write()
        self._free_master_grads()
        casts.forget_weights()

    def _free_master_grads(self) -> None:
        """A master's gradient ends with the step, since ``model.zero_grad()`` cannot reach it."""
        self._twins.free_grads(self.training.sharing, id(self))

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own, and the same for the model weights behind masters."""
        self._measured = self._clip = self._owed = self._kept = None
        if not self.is_open:
            # what it finds, the other optimizers of the pass have to know
            self.settle_debt(check=False)
        self._inner["zero_grad"](*args, **kwargs)
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        self._debt, self._unscaled = None, {}
        self.passes.clear()  # their gradients are gone
        if self.is_open:
            self._aside.clear()
        self._twins.zero_grad(set_to_none=bool(set_to_none))
        leftovers.holders.discard(self)

    def add_param_group(self, group: Any) -> None:
        """The optimizer's own; 16-bit weights in the new group get masters."""
        self._inner["add_param_group"](group)
        self._sync()

    # -- what programs of old look at --------------------------------------------------------------

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """The 16-bit model weights that have masters."""
        return [entry.target for entry in self._sync() if entry.master is not None]

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """The masters of :attr:`all_fp16_params`, in the same order."""
        return [entry.param for entry in self._sync() if entry.master is not None]

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """The tensors in the groups that are their own masters."""
        return [entry.param for entry in self._sync() if entry.master is None]


def _coalesced(weight: torch.Tensor) -> torch.Tensor:
    """The gradient of ``weight``, which becomes a coalesced one if it is sparse."""
    grad = weight.grad
    assert grad is not None
    if grad.is_sparse:
        weight.grad = grad = grad.coalesce()
    return grad
