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
import types
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from apex.amp import _speech, casts
from apex.amp.modules import Master, masters
from apex.amp.policy import HALF_TYPES
from apex.amp.scaler import LossScaler, unscale_

if TYPE_CHECKING:
    from apex.amp.training import Training

_Aside = dict[torch.Tensor, torch.Tensor]  # gradients set aside, by the tensor they belong to
_PATCHED = ("step", "zero_grad", "add_param_group")


class Pass:
    """One backward pass: its scaler, its flag, and the loss, to tell who was non-finite."""

    __slots__ = ("epoch", "found", "index", "loss", "scaler")

    def __init__(
        self, scaler: LossScaler, index: int, found: torch.Tensor, loss: torch.Tensor
    ) -> None:
        self.scaler = scaler
        self.index = index
        self.found = found
        self.loss = loss
        self.epoch = scaler._epoch


class _Slot:
    """A master in a group, with the model weight it stands for."""

    __slots__ = ("_model", "left", "master")

    def __init__(self, model: torch.Tensor, master: Master) -> None:
        self._model = weakref.ref(model)
        self.master = master
        self.left: torch.Tensor | None = None  # scaled gradient of a finished pass

    @property
    def model(self) -> torch.Tensor | None:
        return self._model()


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
        self.is_open = False  # inside a scale_loss block
        self._optimizer = weakref.ref(optimizer)
        self._slots: dict[int, _Slot] = {}  # by id of the master, which the slot keeps alive
        self._debt: Debt | None = None
        self._stepped_once = False
        if use_masters:
            self.adopt(full)
        self._patch(optimizer)
        optimizer._amp_stash = self

    # -- the optimizer's methods ---------------------------------------------------------------

    def _patch(self, optimizer: Any) -> None:
        self._inner = {name: getattr(optimizer, name) for name in _PATCHED}
        self._was_own = {name for name in _PATCHED if name in vars(optimizer)}
        for name, replacement in (
            ("step", _step),
            ("zero_grad", _zero_grad),
            ("add_param_group", _add_param_group),
        ):
            inner = self._inner[name]
            # wraps() carries over the marks by which torch's schedulers know a step of theirs
            wrapped = functools.wraps(getattr(inner, "__func__", inner))(_fresh(replacement))
            setattr(optimizer, name, types.MethodType(wrapped, optimizer))

    def detach(self) -> None:
        """Give the optimizer back as it was: its own methods, the model's weights in its groups."""
        optimizer = self._optimizer()
        if optimizer is None or getattr(optimizer, "_amp_stash", None) is not self:
            return
        for name in _PATCHED:
            if name in self._was_own:
                setattr(optimizer, name, self._inner[name])
            else:
                vars(optimizer).pop(name, None)
        del optimizer._amp_stash
        for group in optimizer.param_groups:
            params = group["params"]
            for index, param in enumerate(params):
                slot = self._slots.get(id(param))
                model = None if slot is None else slot.model
                if model is not None:
                    params[index] = model
                    if param in optimizer.state:
                        optimizer.state[model] = optimizer.state.pop(param)
        self._slots.clear()

    def params(self) -> Iterator[torch.Tensor]:
        """Every tensor in the optimizer's groups."""
        optimizer = self._optimizer()
        for group in () if optimizer is None else optimizer.param_groups:
            yield from group["params"]

    def adopt(self, full: dict[torch.nn.Parameter, torch.Tensor] | None = None) -> None:
        """Put a master in the place of every 16-bit weight that has come into the groups."""
        optimizer = self._optimizer()
        for group in () if optimizer is None else optimizer.param_groups:
            params = group["params"]
            for index, param in enumerate(params):
                if param.dtype in HALF_TYPES:
                    if not isinstance(params, list):
                        params = group["params"] = list(params)
                    params[index] = self._master_for(optimizer, param, full or {})

    @torch.no_grad()
    def _master_for(
        self, optimizer: Any, param: Any, full: dict[torch.nn.Parameter, torch.Tensor]
    ) -> torch.Tensor:
        master = masters.get(param)
        if master is None:
            value = full.get(param)
            wide = param.float() if value is None else value.clone()
            master = Master(wide.detach(), param._version)
            masters[param] = master
        tensor: torch.Tensor = master.tensor.requires_grad_()
        slot = self._slots.setdefault(id(tensor), _Slot(param, master))
        if param in optimizer.state:
            optimizer.state[tensor] = optimizer.state.pop(param)
        if param.grad is not None:  # accumulated before amp came in: unscaled
            tensor.grad, param.grad = param.grad.float(), None
        slot.left = None
        return tensor

    # -- one pass ------------------------------------------------------------------------------

    def _targets(self) -> Iterator[tuple[torch.Tensor, _Slot | None]]:
        """What backward writes gradients to, with the slot of the master behind it."""
        slots = self._slots
        for param in self.params():
            slot = slots.get(id(param))
            if slot is None:
                yield param, None
            elif (model := slot.model) is not None:
                yield model, slot

    def open(self, scaler: LossScaler, scale: torch.Tensor | float) -> _Aside:
        """Set every gradient aside, so that backward leaves only its own.

        Gradients that an earlier pass left scaled stay so if this one has the same scale, and
        are settled first if not.
        """
        if self._debt is not None and not self._debt.matches(scaler, scale):
            self.settle_debt()
        if self.use_masters:
            self.adopt()
        aside: _Aside = {}
        for target, slot in self._targets():
            grad = target.grad
            if slot is not None:
                left, slot.left = slot.left, None
                if grad is not None and grad is left:  # scaled, and already in the master's
                    target.grad = grad = None
            if grad is not None:
                aside[target] = _unshared(grad)
                target.grad = None
        self.is_open = True
        return aside

    def abandon(self, aside: _Aside) -> None:
        """Put every gradient back as :meth:`open` found it."""
        self.is_open = False
        for target, _ in self._targets():
            target.grad = aside.get(target)

    def close_delayed(self, aside: _Aside, debt: Debt) -> None:
        """End a pass whose gradients stay scaled until the next pass or the step."""
        self.is_open = False
        if self._debt is None:
            self._debt = debt
            debt.unscaled = aside
        else:  # of the same scale, or open() had settled it
            _add_back(aside)

    def close(self, aside: _Aside, scale: torch.Tensor | float, done: set[int]) -> Any:
        """Unscale what backward left and add what was set aside.

        Args:
            aside: What :meth:`open` returned.
            scale: The scale the pass began with.
            done: ids of tensors that another optimizer of this pass has dealt with; extended.

        Returns:
            The non-finite flag, see :func:`apex.amp.scaler.unscale_`.
        """
        self.is_open = False
        if self._debt is not None:
            _add_back(aside)
            aside, self._debt = self._debt.unscaled, None
        grads: list[torch.Tensor] = []
        widened: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, slot in self._targets():
            grad = target.grad
            if grad is None:
                continue
            if slot is not None:
                slot.left = grad
            if id(target) in done:
                continue
            done.add(id(target))
            if grad.is_sparse:
                grad = target.grad = grad.coalesce()
            if slot is not None:
                grad = grad.float()
                widened.append((slot.master.tensor, grad))
            grads.append(grad)
        found = unscale_(grads, scale)
        _accumulate(widened)
        if aside:
            self._return(aside)
        return found

    def _return(self, aside: _Aside) -> None:
        """Add unscaled gradients that were set aside: to the master, where there is one."""
        for target, slot in self._targets():
            if slot is not None and target in aside:
                _accumulate([(slot.master.tensor, aside.pop(target).float())])
        _add_back(aside)

    def settle_debt(self) -> None:
        """Unscale what passes with ``delay_unscale`` left, at the scale that made it."""
        debt = self._debt
        if debt is None:
            return
        found = self.close({}, debt.scale, set())
        self.record(debt.scaler, debt.index, found, debt.loss)
        debt.scaler.finish_pass(found)

    def record(self, scaler: LossScaler, index: int, found: Any, loss: torch.Tensor) -> None:
        """Note a finished pass for the step to look at."""
        if found is not None:
            self.passes.append(Pass(scaler, index, found, loss.detach()))

    # -- the step --------------------------------------------------------------------------------

    def can_skip(self) -> bool:
        """Whether any step of this optimizer could be skipped."""
        return any(scaler.dynamic for scaler in self.training.loss_scalers)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step, unless a pass since the last one was not finite."""
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            return self._step_with(closure, args, kwargs)
        self._before_step()
        bad = self._overflowed()
        if bad is not None:
            self._skip(bad)
            return None
        with casts.off():
            result = self._inner["step"](*args, **kwargs)
        self._after_step()
        return result

    def _step_with(self, closure: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.can_skip():
            raise RuntimeError(
                "amp: step() was given a closure, but with dynamic loss scaling a step can be "
                "skipped after the closure ran. Use a static loss_scale (or O4, O5), or call "
                "backward before step()."
            )
        off = casts.off()

        def evaluate() -> Any:
            self._write_models()  # the optimizer may have moved the masters since
            with off.lifted():
                loss = closure()
            self._before_step()
            return loss

        self._before_step()
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        with off:
            result = self._inner["step"](evaluate, *args[1:], **rest)
        self._after_step()
        return result

    def _before_step(self) -> None:
        self.settle_debt()
        if not self.use_masters:
            return
        self.adopt()
        for slot in self._slots.values():
            model = slot.model
            if model is None:
                continue
            if model._version != slot.master.version or not self._stepped_once:
                slot.master.refresh(model)
            grad = model.grad
            if grad is not None and grad is not slot.left:  # a backward outside of scale_loss
                _accumulate([(slot.master.tensor, _values(grad.detach()).float())])
                slot.left = grad

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
        if self.training.verbosity > 0:
            _speech.say(
                f"Gradient overflow.  Skipping step, loss scaler {done.index} "
                f"reducing loss scale to {scale}",
                logging.WARNING,
            )
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._opt_called = True  # torch's schedulers count a skipped step as taken
        message = None
        if self.skipped >= self.training.max_skipped_steps:
            message = self._diagnosis(done, scale)
        self._free_master_grads()
        casts.forget_weights()
        if message is not None:
            raise RuntimeError(message)

    def _diagnosis(self, done: Pass, scale: float) -> str:
        name = "unknown"
        for param in self.params():
            if param.grad is not None and not bool(torch.isfinite(_values(param.grad)).all()):
                slot = self._slots.get(id(param))
                model = param if slot is None else slot.model
                name = self.training.name_of(model)
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

    def _after_step(self) -> None:
        self.skipped = 0
        self._stepped_once = True
        self._write_models()
        self._free_master_grads()
        casts.forget_weights()

    @torch.no_grad()
    def _write_models(self) -> None:
        """Round every master into its model weight."""
        pairs = [(slot, slot.model) for slot in self._slots.values()]
        weights = [model for _, model in pairs if model is not None]
        if not weights:
            return
        torch._foreach_copy_(
            weights, [slot.master.tensor for slot, model in pairs if model is not None]
        )
        for slot, model in pairs:
            if model is not None:
                slot.master.version = model._version

    def _free_master_grads(self) -> None:
        """A master's gradient ends with the step, since ``model.zero_grad()`` cannot reach it."""
        shared = self.training.shared_masters
        for slot in self._slots.values():
            if id(slot.master.tensor) not in shared:
                slot.master.tensor.grad = None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own, and the same for the model weights behind masters."""
        self._inner["zero_grad"](*args, **kwargs)
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        self._debt = None
        for slot in self._slots.values():
            slot.master.tensor.grad = None
            slot.left = None
            model = slot.model
            if model is None or model.grad is None:
                continue
            if set_to_none:
                model.grad = None
            else:
                model.grad.detach_().zero_()

    def add_param_group(self, group: Any) -> None:
        """The optimizer's own; 16-bit weights in the new group get masters."""
        self._inner["add_param_group"](group)
        if self.use_masters:
            self.adopt()

    # -- what programs of old look at --------------------------------------------------------------

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """The 16-bit model weights that have masters."""
        return [m for slot in self._slots.values() if (m := slot.model) is not None]

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """The masters of :attr:`all_fp16_params`, in the same order."""
        return [s.master.tensor for s in self._slots.values() if s.model is not None]

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """The tensors in the groups that are their own masters."""
        return [param for param in self.params() if id(param) not in self._slots]


class Debt:
    """Gradients left scaled by passes with ``delay_unscale``."""

    __slots__ = ("index", "loss", "scale", "scaler", "state", "unscaled")

    def __init__(
        self, scaler: LossScaler, index: int, scale: torch.Tensor | float, loss: torch.Tensor
    ) -> None:
        self.scaler = scaler
        self.index = index
        self.scale = scale
        self.state = scaler._state
        self.loss = loss.detach()
        self.unscaled: _Aside = {}

    def matches(self, scaler: LossScaler, scale: torch.Tensor | float) -> bool:
        """Whether a pass with this scale may add to the same gradients."""
        if isinstance(scale, torch.Tensor):
            return scaler is self.scaler and scaler._state is self.state
        return scale == self.scale


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def _unshared(grad: torch.Tensor) -> torch.Tensor:
    """The gradient, copied if it is part of a buffer that the next backward may write to."""
    if grad.is_sparse or grad.untyped_storage().nbytes() <= grad.numel() * grad.element_size():
        return grad
    return grad.clone()


@torch.no_grad()
def _accumulate(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each tensor its new gradient, on top of what it has accumulated."""
    into: list[torch.Tensor] = []
    new: list[torch.Tensor] = []
    for tensor, grad in pairs:
        if tensor.grad is None:
            tensor.grad = grad
        else:
            into.append(tensor.grad)
            new.append(grad)
    if new:
        torch._foreach_add_(into, new)


@torch.no_grad()
def _add_back(aside: _Aside) -> None:
    """Add gradients that were set aside to those that are there now."""
    into: list[torch.Tensor] = []
    old: list[torch.Tensor] = []
    for target, before in aside.items():
        now = target.grad
        if now is None:
            target.grad = before
        elif now.is_sparse or before.is_sparse:
            target.grad = before + now
        else:
            into.append(now)
            old.append(before)
    if into:
        torch._foreach_add_(into, old)


def _fresh(function: Any) -> Any:
    """A function object of its own, so that ``functools.wraps`` marks only this optimizer's."""
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )


def _step(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._amp_stash.step(*args, **kwargs)


def _zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
    self._amp_stash.zero_grad(*args, **kwargs)


def _add_param_group(self: Any, param_group: Any) -> None:
    self._amp_stash.add_param_group(param_group)
