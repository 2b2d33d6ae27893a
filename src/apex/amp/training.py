"""One training: what an ``initialize`` call made, found again from its optimizers.

It holds scalers and settings, and weak references to models and optimizers: an optimizer keeps
its training alive (through ``_amp_stash``), never the reverse.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from apex.amp.optimizer import OptimizerState
from apex.amp.policy import HALF_TYPES, Properties
from apex.amp.scaler import LossScaler

_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # those that carry a state of ours
_disabled: weakref.WeakSet[Any] = weakref.WeakSet()  # those passed to a disabled initialize


class Training:
    """The models, optimizers, scalers and settings of one ``initialize`` call.

    Attributes:
        properties: Its options.
        loss_scalers: One scaler for each loss.
        verbosity: Whether overflow lines are spoken.
        max_skipped_steps: Skipped steps in a row after which a step raises.
        fused_step: Whether gradients stay scaled until the step.
    """

    def __init__(
        self,
        properties: Properties,
        loss_scalers: list[LossScaler],
        *,
        verbosity: int,
        max_skipped_steps: int,
        fused_step: bool = False,
    ) -> None:
        self.properties = properties
        self.loss_scalers = loss_scalers
        self.verbosity = int(verbosity)
        self.max_skipped_steps = max_skipped_steps
        self.fused_step = fused_step
        self.sharing: dict[int, set[int]] = {}  # states by the id of a tensor they share
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._states: list[weakref.ref[OptimizerState]] = []

    def add_models(self, models: Sequence[torch.nn.Module]) -> None:
        """Remember ``models``, to name their parameters."""
        self._models = [weakref.ref(model) for model in models]

    def add_optimizers(
        self, optimizers: Sequence[Any], full: dict[torch.nn.Parameter, torch.Tensor]
    ) -> None:
        """Give each optimizer its state; ``full`` has the weights' values before rounding."""
        states = []
        for optimizer in optimizers:
            use_masters = bool(self.properties.master_weights)
            state = OptimizerState(optimizer, self, use_masters, full)
            states.append(weakref.ref(state))
            _optimizers.add(optimizer)
        self._states = states
        self.find_shared()

    def find_shared(self) -> None:
        """Note which tensors are in the groups of several optimizers."""
        owners: dict[int, set[int]] = {}
        for state in filter(None, (reference() for reference in self._states)):
            for param in state.params():
                owners.setdefault(id(param), set()).add(id(state))
        self.sharing = {param: ids for param, ids in owners.items() if len(ids) > 1}

    def sharers(self, listed: Sequence[OptimizerState]) -> list[OptimizerState]:
        """The states not listed whose optimizers share a parameter with one that is."""
        if not self.sharing:
            return []
        mine = {id(param) for state in listed for param in state.params()}
        return [
            state
            for reference in self._states
            if (state := reference()) is not None
            and state not in listed
            and any(id(param) in mine for param in state.params())
        ]

    def is_over(self) -> bool:
        """Whether none of its optimizers, or of its models where it has none, is left to amp."""
        if not self._states:
            return not any(reference() is not None for reference in self._models)
        states = map(state_of, list(_optimizers))
        return not any(state is not None and state.training is self for state in states)

    def name_of(self, weight: torch.Tensor | None) -> str:
        """The name of a model weight, with the model's number when there are several."""
        for number, reference in enumerate(self._models):
            model = reference()
            for name, parameter in () if model is None else model.named_parameters():
                if parameter is weight:
                    prefix = f"models[{number}]." if len(self._models) > 1 else ""
                    return f"'{prefix}{name}'"
        shape = None if weight is None else tuple(weight.shape)
        return f"of shape {shape} (in no model passed to initialize)"


def state_of(optimizer: Any) -> OptimizerState | None:
    """Return amp's record of ``optimizer``, or ``None`` if it was never initialised."""
    state = getattr(optimizer, "_amp_stash", None)
    return state if isinstance(state, OptimizerState) else None


def halves_of(optimizer: Any) -> list[torch.Tensor]:
    """The weights that amp has cast to 16 bits and ``optimizer`` steps itself, without masters."""
    state = state_of(optimizer)
    if state is None or state.training.properties.cast_model_type not in HALF_TYPES:
        return []
    return [param for param in state.params() if param.dtype in HALF_TYPES]


def release_optimizer(optimizer: Any) -> None:
    """Give ``optimizer`` its own methods and weights back."""
    state = state_of(optimizer)
    if state is not None:
        state.detach()
        _optimizers.discard(optimizer)


def managed() -> list[Any]:
    """Every optimizer that carries a state of ours."""
    return list(_optimizers)


def set_managed(optimizers: Iterable[Any]) -> None:
    """Have :func:`managed` return exactly ``optimizers``."""
    _optimizers.clear()
    _optimizers.update(optimizers)


def note_disabled(optimizer: Any) -> None:
    """Remember that ``optimizer`` was passed to an ``initialize`` with ``enabled=False``."""
    try:
        _disabled.add(optimizer)
    except TypeError:  # anything may be passed to a disabled initialize
        return


def is_disabled(optimizer: Any) -> bool:
    """Whether ``optimizer`` was passed to an ``initialize`` with ``enabled=False``."""
    try:
        return optimizer in _disabled
    except TypeError:
        return False


def forget_disabled() -> None:
    """Forget what :func:`note_disabled` remembers."""
    _disabled.clear()


__all__ = [
    "Training",
    "forget_disabled",
    "halves_of",
    "is_disabled",
    "managed",
    "note_disabled",
    "release_optimizer",
    "set_managed",
    "state_of",
]
