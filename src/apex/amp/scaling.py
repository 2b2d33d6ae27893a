"""``scale_loss`` brackets one backward pass; all it knows it finds from the optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from apex.amp._amp_state import _amp_state
from apex.amp.casting import rules
from apex.amp.casting import state as casting
from apex.amp.gradients.ledger import Pass, State
from apex.amp.gradients.unscaling import refuse_graph
from apex.amp.optimizer import OptimizerState, state_of
from apex.amp.registry import is_disabled
from apex.amp.scaler import LossScaler

__all__ = ["scale_loss"]


def _states(optimizers: Any) -> list[OptimizerState]:
    """The states of the optimizers passed in; empty when amp is disabled for all of them."""
    listed = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    states = [state_of(optimizer) for optimizer in listed]
    found = [state for state in states if state is not None]
    if len(found) == len(listed) and found:
        return list(dict.fromkeys(found))
    options = getattr(_amp_state, "opt_properties", None)
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
        "optimizer to initialize, and use what it returns."
    )


@contextlib.contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Scale ``loss`` for the backward pass in the block, and unscale the gradients after it.

    Args:
        loss: Any shape; float32 or narrower is scaled in float32.
        optimizers: The optimizers whose parameters the backward pass reaches: one, or a list or
            tuple, as returned by ``initialize``.
        loss_id: Which of ``num_losses`` scalers to use.
        model: Ignored, as in the original.
        delay_unscale: Leave the gradients scaled, to accumulate. The next pass with the same
            optimizers and ``loss_id`` adds to them in place, at the same scale; a pass without
            it, or the step, unscales them. A pass whose forward ran under ``no_sync()`` of
            DistributedDataParallel is delayed in any case.
        delay_overflow_check: Unscale, but leave the loss scale alone until the next check. The
            step is skipped all the same if a gradient is not finite.

    Yields:
        The loss times the loss scale; the very same object when amp is disabled.

    Raises:
        RuntimeError: ``initialize`` was not called, or not with these optimizers; one of them
            is in an open ``scale_loss`` block already; ``backward(create_graph=True)`` was called.
        IndexError: ``loss_id`` is not below ``num_losses``.
        TypeError: ``loss`` is not a floating tensor.
    """
    states = _states(optimizers)
    if not states:
        yield loss
        return
    _warn_of_late_registrations(states)
    this = _pass_of(loss, states, loss_id)
    is_one = not isinstance(this.scale, torch.Tensor) and this.scale == 1.0
    if is_one and not any(state.use_masters for state in states):  # a plain backward
        for ledger in this.ledgers:
            ledger.unscale_delayed()
        with _body():
            yield this.loss
        return
    wide = this.loss
    this.loss = wide.detach()
    this = this.begin()
    try:
        with _body():
            yield wide * _on(this.scale, wide.device)
        for ledger in this.ledgers:
            refuse_graph(ledger.params.targets)
    except BaseException:
        this.abandon()
        raise
    try:
        this.end(delayed=delay_unscale, check=not delay_overflow_check)
    except BaseException:  # such as out of memory
        this.abandon(drop=True)
        raise


def _warn_of_late_registrations(states: Sequence[OptimizerState]) -> None:
    casts = casting.current()
    if casts is not None and states[0].training.properties.casts_functions:
        rules.warn_of_late_registrations(casts)


def _pass_of(loss: Any, states: Sequence[OptimizerState], loss_id: int) -> Pass:
    """The pass that begins, after all checks."""
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        raise TypeError(
            f"amp.scale_loss: loss was {_described(loss)}; it must be a floating tensor to "
            "call backward() on."
        )
    scalers = states[0].training.loss_scalers
    scaler = _scaler(scalers, loss_id)
    for state in states[1:]:
        other = _scaler(state.training.loss_scalers, loss_id)
        if other is not scaler and (
            scaler.dynamic or other.dynamic or scaler.loss_scale() != other.loss_scale()
        ):
            raise RuntimeError(
                "amp.scale_loss: the optimizers went through several amp.initialize calls, whose "
                "loss scales differ. Pass them to one call: amp.initialize(models, optimizers)."
            )
    ledgers = [state.ledger for state in states]
    for state in states:
        state.refuse_superseded()
    for ledger in (*ledgers, *states[0].training.sharers(ledgers)):
        if ledger.state is State.OPEN:
            raise RuntimeError(
                "amp.scale_loss: this optimizer, or one that shares a parameter with it, is in "
                "an open scale_loss block already. Close that block first, or scale the sum of "
                "the losses in one block."
            )
    wide = loss if loss.dtype == torch.float64 else loss.float()
    return Pass(scaler, loss_id % len(scalers), scaler.scale_on(loss.device), ledgers, wide)


def _on(scale: torch.Tensor | float, device: torch.device) -> torch.Tensor | float:
    if isinstance(scale, torch.Tensor) and scale.device != device:
        return scale.to(device, non_blocking=True)
    return scale


@contextlib.contextmanager
def _body() -> Iterator[None]:
    """The body of a block: casts off, cached weight casts gone afterwards."""
    try:
        with casting.off():
            yield
    finally:
        casting.forget_weights()


def _scaler(scalers: Sequence[LossScaler], loss_id: int) -> LossScaler:
    try:
        return scalers[loss_id]
    except IndexError:
        raise IndexError(
            f"amp.scale_loss: loss_id was {loss_id}, but initialize was called with "
            f"num_losses={len(scalers)}; allowed are 0 to {len(scalers) - 1}."
        ) from None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}"
    return f"{value!r} ({type(value).__name__})"
