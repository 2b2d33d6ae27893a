"""``scale_loss`` and the handles of ``amp.init``.

``scale_loss`` brackets one backward pass. All it knows it finds from the optimizers passed in.
If its body raises, gradients, casts and scales are as they were before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from apex.amp._amp_state import _amp_state, master_params, maybe_print
from apex.amp.casting import dispatcher, rules
from apex.amp.casting import state as casting
from apex.amp.casting.log import CastLog
from apex.amp.casting.rules import take
from apex.amp.casting.state import Casts
from apex.amp.opt import OptimWrapper, attach
from apex.amp.optimizer import OptimizerState
from apex.amp.passes import Debt
from apex.amp.scaler import LossScaler
from apex.amp.training import is_disabled, state_of

__all__ = [
    "AmpHandle",
    "LossScaler",
    "NoOpHandle",
    "OptimWrapper",
    "_amp_state",
    "disable_casts",
    "master_params",
    "maybe_print",
    "scale_loss",
]


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
        optimizers: The optimizer, or the list or tuple of optimizers, whose parameters get
            gradients from this backward. Exactly these skip their step if one is not finite.
        loss_id: Which of the ``num_losses`` scalers to use.
        model: Ignored; kept for old callers.
        delay_unscale: Leave the gradients scaled, for a cheaper accumulation: the next block
            without it, or the step, unscales them.
        delay_overflow_check: Unscale, but leave the loss scale alone until the next check. The
            step is skipped all the same if a gradient is not finite.

    Yields:
        The loss times the loss scale; the very same object when amp is disabled.

    Raises:
        RuntimeError: ``initialize`` was not called, or not with these optimizers, or one of them
            is in an open ``scale_loss`` block already.
        IndexError: ``loss_id`` is not below ``num_losses``.
        TypeError: ``loss`` is not a floating tensor.
    """
    states = _states(optimizers)
    if not states:
        yield loss
        return
    block = _Block(loss, states, loss_id)
    if block.needs_nothing():
        with _body():
            yield block.loss
        return
    block.open()
    try:
        with _body():
            yield block.loss * block.scale
    except BaseException:
        block.abandon()
        raise
    if delay_unscale:
        block.close_delayed()
    elif not delay_overflow_check and block.keeps_scaled():
        block.debt.kept = True
        block.close_delayed()
    else:
        block.close(check=not delay_overflow_check)


class _Block:
    """One ``scale_loss`` block: a loss, the states of its optimizers, the scale it began with."""

    def __init__(self, loss: torch.Tensor, states: list[OptimizerState], loss_id: int) -> None:
        if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
            raise TypeError(
                f"amp.scale_loss: loss was {_described(loss)}; it must be a floating tensor to "
                "call backward() on."
            )
        self.loss = loss if loss.dtype == torch.float64 else loss.float()
        self.states = states
        self.training = states[0].training
        scaler = _scaler(self.training.loss_scalers, loss_id)
        index = loss_id % len(self.training.loss_scalers)
        for state in (*states, *self.training.sharers(states)):
            if state.is_open:
                raise RuntimeError(
                    "amp.scale_loss: this optimizer, or one that shares a parameter with it, is in "
                    "an open scale_loss block already. Close that block first, or scale the sum of "
                    "the losses in one block."
                )
        self.scale = scaler.scale_on(loss.device)
        self.debt = Debt(scaler, index, self.scale, states, self.loss)

    def needs_nothing(self) -> bool:
        """Whether a plain backward is all there is to do: scale 1, no masters, no check."""
        if isinstance(self.scale, torch.Tensor) or self.scale != 1.0:
            return False
        for state in self.states:
            state.settle_debt()
        return not any(state.use_masters for state in self.states)

    def open(self) -> None:
        """Set accumulated gradients aside."""
        for state in self.states:
            state.settle_debt(unless=self.debt)
        self.aside = [state.open() for state in self.states]

    def abandon(self) -> None:
        """Put everything back as it was."""
        for state, aside in zip(reversed(self.states), reversed(self.aside), strict=True):
            state.abandon(aside)  # the first to open has the gradients that are shared

    def keeps_scaled(self) -> bool:
        """Whether the gradients are to stay scaled until the step; see apex.amp.fused_step."""
        return len(self.states) == 1 and self.states[0].keeps_scaled(self.aside[0])

    def close_delayed(self) -> None:
        """Leave the gradients scaled."""
        self.debt.loss = self.loss.detach()
        for state, aside in zip(self.states, self.aside, strict=True):
            state.close_delayed(aside, self.debt)

    def close(self, *, check: bool) -> None:
        """Unscale what is left, here and by delayed passes that this one was added to."""
        self.debt.settle(self.aside, check=check)


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


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Switch function casts off for a block; nests, and does nothing where none are on.

    Initialised models called inside still compute at their own level.
    """
    with casting.off():
        yield


class AmpHandle:
    """What ``amp.init`` returns: the casts it switched on, and the 2018 way to scale a loss.

    Args:
        loss_scale: ``"dynamic"`` or a number.
        enable_caching: Kept for old callers; no weight cast outlives a forward here.
        verbose: Whether each cast is logged.
    """

    def __init__(
        self,
        loss_scale: str | float = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
    ) -> None:
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._cache: dict[torch.Tensor, torch.Tensor] = {}
        self._default_scaler: LossScaler | None = LossScaler(loss_scale)
        self._is_active = True
        self._all_wrappers: list[tuple[Any, str, Any]] = []
        self._casts: Casts | None = None

    def make_casts(self, dtype: torch.dtype, *, allow_banned: bool = False) -> Casts:
        """Build function casts, with the registrations that wait; they are not switched on yet.

        Args:
            dtype: The 16-bit type.
            allow_banned: Cast banned functions to float32 instead of refusing them.
        """
        dispatcher.install()
        self._casts = rules.casts_for(dtype, take(), allow_banned=allow_banned)
        if self._verbose:
            self._casts.log = CastLog()
        return self._casts

    def activate(self, devices: tuple[str, ...]) -> None:
        """Switch the casts of :meth:`make_casts` on in this thread, on ``devices``."""
        assert self._casts is not None
        casting.enable_for_thread(self._casts, devices)
        _amp_state.handle = self  # type: ignore[attr-defined]

    def is_active(self) -> bool:
        """Whether the handle's casts are in force."""
        return self._is_active

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        before, self._is_active = self._is_active, False
        try:
            with casting.off():
                yield
        finally:
            self._is_active = before

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Wrap ``optimizer`` for ``num_loss`` losses, each with a dynamic scaler of its own."""
        self._default_scaler = None
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
        """Scale one loss for one optimizer; see :meth:`wrap_optimizer` for several.

        Raises:
            RuntimeError: ``wrap_optimizer`` was called: use the wrapper's ``scale_loss``.
        """
        if not self.is_active():
            yield loss
            return
        if self._default_scaler is None:
            raise RuntimeError(
                "amp: after handle.wrap_optimizer() use the wrapped optimizer's own "
                "scale_loss(loss)."
            )
        attach(optimizer, [self._default_scaler])
        with scale_loss(loss, optimizer) as scaled:
            yield scaled

    def _clear_cache(self) -> None:
        self._cache.clear()
        casting.forget_weights()

    def _save_func(self, mod: Any, fn: str, func: Any) -> None:
        self._all_wrappers.append((mod, fn, func))

    def _deactivate(self) -> None:
        """Switch the handle's casts off for good and put saved functions back."""
        for module, name, function in reversed(self._all_wrappers):
            setattr(module, name, function)
        self._all_wrappers = []
        self._is_active = False
        if self._casts is not None and casting.is_enabled_for_thread(self._casts):
            casting.disable_for_thread()

    @property
    def has_cache(self) -> bool:
        """Whether weight casts may be cached."""
        return self._enable_caching

    @property
    def cache(self) -> dict[torch.Tensor, torch.Tensor]:
        """Always empty: torch keeps the cache of weight casts."""
        return self._cache

    def remove_cache(self, param: torch.Tensor) -> None:
        """Forget the cached cast of ``param``."""
        self._cache.pop(param, None)
        casting.forget_weights()

    @property
    def verbose(self) -> bool:
        """Whether each cast is logged."""
        return self._verbose


class NoOpHandle:
    """What ``amp.init(enabled=False)`` returns: everything passes through."""

    def is_active(self) -> bool:
        """Return False."""
        return False

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Wrap ``optimizer`` in a pass-through."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
        """Yield ``loss`` itself."""
        yield loss

    @property
    def has_cache(self) -> bool:
        """Return False."""
        return False

    @property
    def verbose(self) -> bool:
        """Return False."""
        return False

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass
