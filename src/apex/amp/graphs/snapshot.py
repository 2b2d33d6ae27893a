"""What Python holds of a step, to be put back after a capture that has failed in the middle of one.

Nothing was computed, so memory is as before. But gradients are tensors that nothing has filled, and
amp's records are those of a step that has not been taken.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from apex.amp.gradients.masters import table
from apex.amp.optimizer import OptimizerState


class Snapshot:
    """Gradients, and amp's records of gradients and masters.

    Attributes:
        gradients: Of weights and masters.
    """

    def __init__(self, states: Sequence[OptimizerState]) -> None:
        weights = [weight for state in states for weight in state.params.targets]
        masters = [master for weight in weights if (master := table.get(weight)) is not None]
        tensors = [*weights, *(master.tensor for master in masters)]
        owners: list[tuple[Any, Sequence[str]]] = [
            *((tensor, ["grad"]) for tensor in tensors),
            *((master, ("taken", "waiting")) for master in masters),
            *((state.params, ["exposed"]) for state in states),
            *((state.ledger, [*vars(state.ledger)]) for state in states),
        ]
        self._records = [
            (o, name, _copied(getattr(o, name))) for o, names in owners for name in names
        ]
        self.gradients = [grad for tensor in tensors if (grad := tensor.grad) is not None]

    def put_back(self) -> None:
        """Put all of it back."""
        for owner, name, value in self._records:
            setattr(owner, name, value)


def _copied(value: Any) -> Any:
    """Copy what is written in place."""
    return copy.copy(value) if isinstance(value, (list, set)) else value
