"""``scale_loss`` brackets one backward pass; all it knows it finds from the optimizers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apex.amp.casting import rules, switches
from apex.amp.casting.dispatcher import skip_frames
from apex.amp.gradients import overflow
from apex.amp.gradients.ledger import Ledger, Pass, State
from apex.amp.newest import newest
from apex.amp.optimizer import OptimizerState, state_of
from apex.amp.scale import Scale
from apex.amp.training import is_disabled, managed_states, moments

__all__ = ["scale_loss"]


def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[torch.Tensor]:
    """Scale ``loss`` for the backward pass in the block, and unscale the gradients after it.

    Args:
        loss: Floating tensor of any shape. Losses of up to 32 bits are scaled in float32.
        optimizers: The optimizers whose parameters the backward pass reaches: one, or a list or
            tuple, as returned by ``initialize``.
        loss_id: Which of the ``num_losses`` scalers to use.
        model: Ignored, as in the original.
        delay_unscale: Leave the gradients scaled, to accumulate. The next pass with the same
            optimizers and ``loss_id`` adds to them in place, at the same scale. A pass without
            ``delay_unscale``, or the step, unscales them. A pass whose forward ran under
            ``no_sync()`` of DistributedDataParallel is always delayed.
        delay_overflow_check: Unscale, but leave the loss scale unchanged until the next check. The
            step is still skipped if a gradient is not finite.

    Returns:
        A context manager that yields the loss times the loss scale, or ``loss`` itself if amp is
        disabled.

    Raises:
        RuntimeError: You did not call ``initialize``, or not with these optimizers; one of them is
            already in an open ``scale_loss`` block; or you called ``backward(create_graph=True)``.
        IndexError: ``loss_id`` is ``num_losses`` or more.
        TypeError: ``loss`` is not a floating tensor.

    Warns:
        UserWarning: The block computed gradients of something other than the scaled loss.

    Pass every optimizer that the backward pass reaches. Otherwise nothing unscales the gradients of
    the others, and their ``step`` raises ``RuntimeError`` unless you clear these gradients first.
    """
    return _ScaledLoss(loss, optimizers, loss_id, delay_unscale, not delay_overflow_check)


@dataclass(eq=False)
class _ScaledLoss(contextlib.AbstractContextManager[torch.Tensor]):
    """What :func:`scale_loss` returns; errors are raised where the block begins."""

    loss: Any
    optimizers: Any
    loss_id: int
    delayed: bool
    check: bool
    _pass: Pass | None = None  # None: a plain backward
    _off: Any = None  # casts are off inside
    # Gradients of the scaled loss, once a backward pass went through it; None: not looked at.
    _reached: list[Any] | None = None
    _is_root: bool = False  # whether a backward pass has to begin with the scaled loss
    # Optimizers that are not listed: how often one began, its weight if that was written, hooks.
    _others: Sequence[tuple[Ledger, int, list[torch.Tensor], Any]] = ()

    def __enter__(self) -> torch.Tensor:
        states = _states(self.optimizers)
        loss: torch.Tensor = self.loss
        if not states:
            return loss
        training = states[0].training
        if training.casts_functions and any(rules.REGISTRIES):
            rules.warn_of_late_registrations(training.casts(), switches.current())
        scaler = _scaler_of(states, loss, self.loss_id)
        for state in states:
            state.training.last_pass = next(moments)
        wide = loss if loss.dtype == torch.float64 else loss.float()
        if scaler.static == 1.0 and not any([state.use_masters for state in states]):
            self._off = switches.off()
            self._off.__enter__()
            return wide
        ledgers = [state.ledger for state in states]
        index = self.loss_id % len(states[0].training.loss_scalers)
        this = Pass(scaler, index, ledgers, wide.detach())
        try:
            this = this.begin()
            self._off = switches.off()
            self._off.__enter__()
            scale = this.scale
            if isinstance(scale, torch.Tensor) and scale.device != wide.device:
                scale = scale.to(wide.device, non_blocking=True)
            scaled = wide * scale
            self._watch(scaled, this, ledgers)
        except BaseException:
            this.abandon()
            raise
        self._pass = this
        return scaled

    def _watch(self, scaled: torch.Tensor, this: Pass, ledgers: list[Ledger]) -> None:
        """Look for two mistakes: another root of the backward pass, and an optimizer left out."""
        if this.scaler.static == 1.0 or scaled.grad_fn is None:
            return
        self._reached = []
        scaled.grad_fn.register_prehook(self._reached.append)
        training = ledgers[0].training
        # Stages of a pipeline get scaled gradients. A delayed pass has gradients from before.
        is_root = scaled.numel() == 1 and training.process_group is None
        self._is_root = is_root and all([ledger.scaled is None for ledger in ledgers])
        if training.has_several:
            owners = training.co_owners(ledgers) if training.shared else []
            idle = [one for one in training.ledgers() if one.state is State.UNSCALED]
            self._others = [self._watch_other(one) for one in idle if one not in owners]

    def _watch_other(self, ledger: Ledger) -> tuple[Ledger, int, list[torch.Tensor], Any]:
        """Record the last weight when its gradient is written: a hook on each takes 10 us."""
        written: list[torch.Tensor] = []
        weights = [weight for weight in ledger.params.targets[-1:] if weight.requires_grad]
        hooks: list[Any] = [
            weight.register_post_accumulate_grad_hook(written.append)  # type: ignore[no-untyped-call]
            for weight in weights
        ]
        return ledger, ledger.began, written, hooks

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self._off is None:
            return
        try:  # unscaling is not cast either
            for other, began, written, hooks in self._others:
                for hook in hooks:
                    hook.remove()
                if self._reached and began == other.began:  # no block of it, no zero_grad since
                    other.record_scaled_elsewhere(written)
            this = self._pass
            if this is None:
                return
            if kind is not None:
                this.abandon()
                return
            grads = [weight.grad for ledger in this.ledgers for weight in ledger.params.targets]
            if any([grad is not None and grad.requires_grad for grad in grads]):
                this.abandon()
                raise RuntimeError(_HAS_GRAPH)
            if self._reached == [] and self._is_root and this.has_written():
                warnings.warn(_OTHER_ROOT, stacklevel=2)
            try:
                this.end(delayed=self.delayed, check=self.check)
                _look_at_static(this)
            except BaseException:  # such as out of memory
                this.abandon(drop=True)
                raise
        finally:
            self._off.__exit__()
            switches.forget_weights()  # a step makes cached casts stale


def _look_at_static(this: Pass) -> None:
    """Have a static scale that is too large noticed: it skips no step."""
    scale = this.scaler.static
    if scale is not None and scale != 1.0 and not _is_watched(this):
        params = [ledger.params for ledger in this.ledgers]
        weights = [weight for one in params for weight in (*one.stepped, *one.targets)]
        training = this.ledgers[0].training
        training.unnoticed.look_at(scale, this.loss, weights, overflow.AsyncCopy)


def _is_watched(this: Pass) -> bool:
    """Whether apex.debug watches one of the optimizers, and says more."""
    watched = [state for state in managed_states() if state.observer is not None]
    return any([state.ledger in this.ledgers for state in watched])


_HAS_GRAPH = (
    "amp.scale_loss: backward(create_graph=True) was called in the block. Unscaling gradients does "
    "not unscale their graph, so a penalty on p.grad would be scaled. Compute the gradients "
    "outside the block, from a scaled loss so that none is too small for 16 bits, and divide them: "
    "scale = 2.0**16; grads = torch.autograd.grad(loss * scale, params, create_graph=True); grads "
    "= [g.float() / scale for g in grads]. Add the penalty on them to the loss that goes through "
    "amp.scale_loss."
)
_OTHER_ROOT = (
    "amp.scale_loss: the block computed gradients, but not from the scaled loss. amp still divides "
    "them by the loss scale, so the step hardly changes the weights. Call backward() of the loss "
    "that the block yields: `with amp.scale_loss(loss, optimizer) as scaled_loss: "
    "scaled_loss.backward()`."
)


def _states(optimizers: Any) -> list[OptimizerState]:
    """The states of the optimizers passed in; empty when amp is disabled for all of them."""
    listed = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    states = [state_of(optimizer) for optimizer in listed]
    found = [state for state in states if state is not None]
    if len(found) == len(listed) and found:
        return list(dict.fromkeys(found))
    options = getattr(newest, "opt_properties", None)
    if options is None:
        raise RuntimeError(
            "amp.scale_loss was called before amp.initialize. Call "
            "model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
        )
    others = [o for o, state in zip(listed, states, strict=True) if state is None]
    if not found and (not options.enabled or (others and all(map(is_disabled, others)))):
        return []
    names = ", ".join(type(other).__name__ for other in others) or "an empty list"
    raise RuntimeError(
        f"amp.scale_loss was given {names}, which did not go through amp.initialize. Pass every "
        "optimizer to initialize, and use the optimizers that it returns."
    )


def _scaler_of(states: Sequence[OptimizerState], loss: Any, loss_id: int) -> Scale:
    """The scaler of the pass that begins, after all checks."""
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        given = f"{loss!r} ({type(loss).__name__})"
        given = f"a tensor of {loss.dtype}" if isinstance(loss, torch.Tensor) else given
        raise TypeError(
            f"amp.scale_loss: loss was {given}; it must be a floating tensor to call backward() on."
        )
    training = states[0].training
    try:
        scaler = training.loss_scalers[loss_id]
    except IndexError:
        number = len(training.loss_scalers)
        raise IndexError(
            f"amp.scale_loss: loss_id was {loss_id}, but initialize was called with "
            f"num_losses={number}; allowed are 0 to {number - 1}."
        ) from None
    for state in states:
        if state.superseded:
            state.refuse_superseded()
        if state.training is not training:
            other = state.training.loss_scalers[loss_id % len(state.training.loss_scalers)]
            if scaler.dynamic or other.dynamic or scaler.loss_scale() != other.loss_scale():
                raise RuntimeError(
                    "amp.scale_loss: the optimizers went through several amp.initialize calls, "
                    "whose loss scales differ. Pass them to one call: "
                    "amp.initialize(models, optimizers)."
                )
    ledgers = [state.ledger for state in states]
    if training.shared:
        ledgers += training.co_owners(ledgers)
    if any([ledger.state is State.OPEN for ledger in ledgers]):
        raise RuntimeError(
            "amp.scale_loss: this optimizer, or one that shares a parameter with it, is in "
            "an open scale_loss block already. Close that block first, or scale the sum of "
            "the losses in one block."
        )
    return scaler


# In a compiled step these run as they are: traced, ten steps of a perceptron with the back end
# "eager" took 32 s instead of 5, in 141 frames instead of 6.
skip_frames(
    _ScaledLoss.__enter__, _ScaledLoss.__exit__, OptimizerState.step, OptimizerState.zero_grad
)
