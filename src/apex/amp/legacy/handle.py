"""The handles of ``amp.init``: the casts it switched on, and the 2018 way to scale a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch

from apex.amp import checks
from apex.amp.casting import switches
from apex.amp.casting.switches import Casts
from apex.amp.functions import disable_casts
from apex.amp.legacy.amp_state import AmpState, _amp_state, master_params, maybe_print
from apex.amp.legacy.opt import OptimWrapper
from apex.amp.legacy.scaler import LossScaler
from apex.amp.levels import Properties
from apex.amp.optimizer import OptimizerState, state_of
from apex.amp.scaling import scale_loss
from apex.amp.training import Training


class AmpHandle:
    """What ``amp.init`` returns: the casts it switched on, and the 2018 way to scale a loss.

    Optimizers that its blocks are given belong to one training, as those of one ``initialize``. The
    arguments are those of :func:`apex.amp.init`.
    """

    def __init__(
        self,
        loss_scale: str | float = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
    ) -> None:
        properties = Properties()
        properties._update_options_dict([("enabled", True), ("master_weights", False)])
        properties.loss_scale = loss_scale
        self._training = Training(
            properties, [], verbosity=_amp_state.verbosity, max_skipped_steps=50
        )
        self._has_cache = enable_caching
        self._verbose = verbose
        self._cache: dict[torch.Tensor, torch.Tensor] = {}  # always empty: torch has it
        self._default_scaler: LossScaler | None = self.new_scalers(1)[0]
        self._is_active = True
        self._all_wrappers: list[tuple[Any, str, Any]] = []
        self._casts: Casts | None = None

    # To write them would change nothing.
    has_cache = property(attrgetter("_has_cache"))
    verbose = property(attrgetter("_verbose"))
    cache = property(attrgetter("_cache"))

    def __deepcopy__(self, memo: dict[int, Any]) -> AmpHandle:
        return self  # a copy of a wrapped optimizer stays with its handle

    def __reduce__(self) -> tuple[Any, ...]:
        # Casts belong to a process; in another one amp.init switches them on.
        loss_scale = self._training.properties.loss_scale
        arguments = loss_scale, self.has_cache, self.verbose
        return AmpHandle, arguments, {"_is_active": self._is_active}

    @classmethod
    def of(cls, casts: Casts) -> AmpHandle:
        """The handle of ``casts`` that an ``initialize`` has switched on."""
        training = _amp_state.training
        handle = cls(training.properties.loss_scale, verbose=training.verbosity == 2)
        handle._casts = casts
        return handle

    def activate(self, casts: Casts, devices: tuple[str, ...]) -> None:
        """Switch ``casts`` on in this thread, on ``devices``, until :meth:`_deactivate`."""
        self._casts = casts
        switches.enable_for_thread(casts, devices)
        _amp_state.handle = self

    def is_active(self) -> bool:
        """Whether the handle scales losses: until ``_deactivate``, not in ``_disable_casts``."""
        return self._is_active

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        before, self._is_active = self._is_active, False
        try:
            with switches.off():
                yield
        finally:
            self._is_active = before

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """Wrap ``optimizer`` for ``num_loss`` losses, each with a scaler of its own."""
        wrapper = OptimWrapper(optimizer, self, num_loss)
        self._default_scaler = None
        return wrapper

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
        """Scale one loss for an optimizer or a list; :meth:`wrap_optimizer` is for several losses.

        Raises:
            RuntimeError: ``wrap_optimizer`` was called: use the wrapper's ``scale_loss``; or
                ``optimizer`` went through ``amp.initialize``: use ``amp.scale_loss``.
        """
        if not self.is_active():
            yield loss
            return
        if self._default_scaler is None:
            raise RuntimeError(
                "amp: after handle.wrap_optimizer() use the wrapped optimizer's own "
                "scale_loss(loss)."
            )
        number = self.manage(optimizer, [self._default_scaler])
        with scale_loss(loss, optimizer, loss_id=number) as scaled:
            yield scaled

    def new_scalers(self, number: int) -> list[LossScaler]:
        """Make as many scalers, with the handle's ``loss_scale``."""
        return [LossScaler(self._training.properties.loss_scale) for _ in range(number)]

    def manage(self, optimizers: Any, scalers: list[LossScaler]) -> int:
        """Take what is given into the handle's training; return the first scaler's ``loss_id``."""
        for optimizer in checks.optimizer_list(optimizers, "amp.init's handle"):
            record = state_of(optimizer)
            if record is not None and record.training is self._training:
                continue
            if record is not None and record.training.properties.opt_level is not None:
                raise RuntimeError(
                    f"amp: this {type(optimizer).__name__} went through amp.initialize. Use "
                    "amp.scale_loss(loss, optimizer), with num_losses=... in initialize for "
                    "several losses; or leave amp.initialize out."
                )
            if record is not None:  # of another handle
                record.detach()
            OptimizerState(optimizer, self._training, use_masters=False, full={})
        known = self._training.loss_scalers
        known += [scaler for scaler in scalers if scaler not in known]
        return known.index(scalers[0])

    def _clear_cache(self) -> None:
        switches.forget_weights()

    def _save_func(self, mod: Any, fn: str, func: Any) -> None:
        self._all_wrappers.append((mod, fn, func))

    def _deactivate(self) -> None:
        """Switch the handle's casts off for good and put saved functions back."""
        for module, name, function in reversed(self._all_wrappers):
            setattr(module, name, function)
        self._all_wrappers = []
        self._is_active = False
        if self._casts is not None and switches.is_enabled_for_thread(self._casts):
            switches.disable_for_thread()

    def remove_cache(self, param: torch.Tensor) -> None:
        """Forget the cached cast of ``param``, with all others."""
        switches.forget_weights()


AmpState.handle_type = AmpHandle


class NoOpHandle:
    """What ``amp.init(enabled=False)`` returns: everything passes through."""

    has_cache = verbose = False

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

    def new_scalers(self, number: int) -> list[LossScaler]:
        """Return an empty list."""
        return []

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass
