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
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from apex.amp import _speech, casts
from apex.amp.modules import Master, leftovers, masters
from apex.amp.passes import Aside, Debt, Pass, accumulate, add_back, stored_values, unshared
from apex.amp.policy import HALF_TYPES
from apex.amp.scaler import LossScaler, unscale_

if TYPE_CHECKING:
    from apex.amp.training import Training

_PATCHED = ("step", "zero_grad", "add_param_group")
_OLD_HOOKS = ("_lazy_init_maybe_master_weights", "_amp_lazy_init")  # called by programs of old


class _Entry:
    """One tensor in the optimizer's groups.

    Attributes:
        param: What the optimizer steps: a master, or the model's own weight.
        target: What backward writes gradients to: always the model's weight.
        master: The master, where ``param`` is one.
    """

    __slots__ = ("master", "param", "target")

    def __init__(self, param: torch.Tensor, target: torch.Tensor, master: Master | None) -> None:
        self.param = param
        self.target = target
        self.master = master


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
        self.landed = False  # whether the last step was taken
        self.lazy_init_called = True  # read and written by programs of old
        self.is_open = False  # inside a scale_loss block
        self._optimizer = weakref.ref(optimizer)
        self._entries: list[_Entry] = []
        self._ids: list[int] = []
        self._debt: Debt | None = None
        self._aside: Aside = {}
        self._stepped_once = False
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
        self._sync()
        self._is_attached = False
        self._unpatch(optimizer)
        weights = {id(e.param): e.target for e in self._entries if e.master is not None}
        for group in optimizer.param_groups:
            group["params"][:] = [weights.get(id(param), param) for param in group["params"]]
        for entry in self._entries:
            if entry.master is not None and entry.param in optimizer.state:
                optimizer.state[entry.target] = optimizer.state.pop(entry.param)
        self._entries, self._ids = [], []

    def params(self) -> Iterator[torch.Tensor]:
        """Every tensor in the optimizer's groups."""
        optimizer = self._optimizer()
        for group in () if optimizer is None else optimizer.param_groups:
            yield from group["params"]

    def _sync(self, full: dict[torch.nn.Parameter, torch.Tensor] | None = None) -> list[_Entry]:
        """The entries for what is in the groups now, with masters for new 16-bit weights."""
        optimizer = self._optimizer()
        ids: list[int] = []
        for group in () if optimizer is None else optimizer.param_groups:
            ids += map(id, group["params"])
        if ids == self._ids:  # the entries keep their tensors alive, so an id says who it is
            return self._entries
        known = {id(entry.param): entry for entry in self._entries}
        known.update({id(entry.target): entry for entry in self._entries})
        entries = []
        for group in () if optimizer is None else optimizer.param_groups:
            if not isinstance(group["params"], list):
                group["params"] = list(group["params"])
            params = group["params"]
            for index, param in enumerate(params):
                entry = known.get(id(param)) or self._entry(optimizer, param, full or {})
                params[index] = entry.param
                entries.append(entry)
        self._entries, self._ids = entries, [id(entry.param) for entry in entries]
        return entries

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
            optimizer.state[tensor] = optimizer.state.pop(param)
        if param.grad is not None:  # accumulated before amp came in: unscaled
            tensor.grad, param.grad = param.grad.float(), None
        return _Entry(tensor, param, master)

    # -- one pass ------------------------------------------------------------------------------

    def open(self, scaler: LossScaler, scale: torch.Tensor | float) -> Aside:
        """Set every gradient aside, so that backward leaves only its own.

        Gradients that an earlier pass left scaled stay so if this one has the same scale, and
        are settled first if not.
        """
        if self._debt is not None and not self._debt.matches(scaler, scale):
            self.settle_debt()
        aside: Aside = {}
        for entry in self._sync():
            target = entry.target
            grad = target.grad
            master = entry.master
            if grad is not None:
                if master is None or grad is not master.left:  # else in the master's already
                    aside[target] = unshared(grad)
                target.grad = None
            if master is not None:
                master.left = None
        self.is_open = True
        self._aside = aside
        return aside

    def abandon(self, aside: Aside) -> None:
        """Put every gradient back as :meth:`open` found it."""
        self.is_open = False
        for entry in self._entries:
            entry.target.grad = aside.get(entry.target)

    def close_delayed(self, aside: Aside, debt: Debt) -> None:
        """End a pass whose gradients stay scaled until the next pass or the step."""
        self.is_open = False
        if self._debt is None:
            self._debt = debt
            debt.unscaled = aside
        else:  # of the same scale, or open() had settled it
            add_back(aside)

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
            aside, self._debt = self._debt.unscaled, None
        sharing = self.training.sharing
        if self.use_masters:
            leftovers.holders.add(self)
        grads: list[torch.Tensor] = []
        widened: list[tuple[torch.Tensor, torch.Tensor]] = []
        for entry in self._sync():
            grad = entry.target.grad
            if grad is None:
                continue
            if done is not None:
                if id(entry.target) in done:
                    continue
                done.add(id(entry.target))
            if grad.is_sparse:
                grad = entry.target.grad = grad.coalesce()
            master = entry.master
            if master is not None:
                master.leave(grad, sharing.get(id(entry.param)))
                grad = grad.float()
                widened.append((entry.param, grad))
            grads.append(grad)
        found = unscale_(grads, scale)
        accumulate(widened)
        if aside:
            self._return(aside)
        return found

    def _return(self, aside: Aside) -> None:
        """Add unscaled gradients that were set aside: to the master, where there is one."""
        for entry in self._entries:
            if entry.master is not None and entry.target in aside:
                accumulate([(entry.param, aside.pop(entry.target).float())])
        add_back(aside)

    def settle_debt(self) -> None:
        """Unscale what passes with ``delay_unscale`` left, at the scale that made it."""
        debt = self._debt
        if debt is None:
            return
        found = self.close({}, debt.scale, None)
        self.record(debt.scaler, debt.index, found, debt.loss)
        debt.scaler.finish_pass(found)

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
        for entry in self._entries:
            master = entry.master
            if master is not None and master.left is not None:
                if entry.target.grad is master.left:
                    entry.target.grad = None
                master.left = None

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
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            return self._step_with(closure, args, kwargs)
        self.collect()
        bad = self._overflowed()
        if bad is not None:
            self._skip(bad)
            return None
        with casts.off():
            result = self._inner["step"](*args, **kwargs)
        self._after_step()
        return result

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
            self._write_models()  # the optimizer may have moved the masters since
            with off.lifted():
                loss = closure()
            self.collect()
            return loss

        self.collect()
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        with off:
            result = self._inner["step"](evaluate, *args[1:], **rest)
        self._after_step()
        return result

    def collect(self) -> None:
        """Bring every gradient to where the optimizer looks for it, unscaled.

        Settles what delayed passes left, takes over what others wrote into 16-bit weights, and
        hands the gradients of a backward outside of ``scale_loss`` to the masters.
        """
        self.settle_debt()
        entries = self._sync()
        if not self.use_masters:
            return
        stepped = self._stepped_once
        for entry in entries:
            master = entry.master
            if master is None:
                continue
            target = entry.target
            if target._version != master.version or not stepped:
                master.refresh(target)
            grad = target.grad
            if grad is None:
                continue
            if grad is not master.left:
                new = grad.detach().coalesce() if grad.is_sparse else grad.detach()
                accumulate([(entry.param, new.float())])
                master.leave(grad, None)
                leftovers.holders.add(self)
            elif grad._version != master.left_version and not self._warned:
                self._warned = True
                warnings.warn(
                    "amp: gradients of 16-bit model weights were changed after scale_loss (by "
                    "clipping, or by another backward of the same forward?). That has no effect: "
                    "the optimizer steps the float32 masters. Use amp.clip_grad_norm_(optimizer, "
                    "max_norm), or clip amp.master_params(optimizer); call every backward in "
                    "scale_loss.",
                    stacklevel=4,
                )

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
        self.landed = False
        if self.training.verbosity > 0:
            _speech.say(
                f"Gradient overflow.  Skipping step, loss scaler {done.index} "
                f"reducing loss scale to {scale}",
                logging.WARNING,
            )
        self._count_as_called()
        message = None
        if self.skipped >= self.training.max_skipped_steps:
            message = self._diagnosis(done, scale)
        self._free_master_grads()
        casts.forget_weights()
        if message is not None:
            raise RuntimeError(message)

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

    def _after_step(self) -> None:
        self.skipped = 0
        self.landed = True
        self._stepped_once = True
        self._write_models()
        self._free_master_grads()
        casts.forget_weights()

    @torch.no_grad()
    def _write_models(self) -> None:
        """Round every master into its model weight."""
        pairs = [(e.master, e.target) for e in self._entries if e.master is not None]
        if not pairs:
            return
        for device_pairs in _by_device(pairs):
            torch._foreach_copy_(
                [weight for _, weight in device_pairs],
                [master.tensor for master, _ in device_pairs],
            )
        for master, weight in pairs:
            master.version = weight._version

    def _free_master_grads(self) -> None:
        """A master's gradient ends with the step, since ``model.zero_grad()`` cannot reach it."""
        for entry in self._entries:
            master = entry.master
            if master is not None:
                if master.waiting:  # another optimizer has yet to step on it
                    master.waiting.discard(id(self))
                    if master.waiting:
                        continue
                entry.param.grad = None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own, and the same for the model weights behind masters."""
        self._inner["zero_grad"](*args, **kwargs)
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        self._debt = None
        self.passes.clear()  # their gradients are gone
        if self.is_open:
            self._aside.clear()
        for entry in self._entries:
            if entry.master is None:
                continue
            entry.param.grad = None
            entry.master.left = None
            target = entry.target
            if set_to_none:
                target.grad = None
            elif target.grad is not None:
                target.grad.detach_().zero_()

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


def _by_device(
    pairs: list[tuple[Master, torch.Tensor]],
) -> Iterable[list[tuple[Master, torch.Tensor]]]:
    groups: dict[torch.device, list[tuple[Master, torch.Tensor]]] = {}
    for pair in pairs:
        groups.setdefault(pair[1].device, []).append(pair)
    return groups.values()
