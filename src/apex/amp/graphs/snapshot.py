"""What Python holds of a step, to be put back after a capture that has failed in the middle of one.

Nothing was computed, so memory is as before. But gradients are tensors that nothing has filled, and
amp's records are those of a step that has not been taken.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from apex.amp.gradients.masters import table
from apex.amp.optimizer import OptimizerState


class Snapshot:
    """Gradients, and amp's records of gradients and masters."""

    def __init__(self, states: Sequence[OptimizerState]) -> None:
        weights = [weight for state in states for weight in state.params.targets]
        masters = [master for weight in weights if (master := table.get(weight)) is not None]
        tensors = [*weights, *(master.tensor for master in masters)]
        self._grads = [
            (tensor, grad, _version(grad)) for tensor in tensors for grad in [tensor.grad]
        ]
        owners: list[tuple[Any, Any]] = [
            *((master, ("taken", "taken_version", "waiting")) for master in masters),
            *((state.params, ("are_freed", "exposed")) for state in states),
            *((state.ledger, vars(state.ledger)) for state in states),
        ]
        self._records = [
            (o, name, _copied(getattr(o, name))) for o, names in owners for name in names
        ]

    def kept_gradients(self) -> list[torch.Tensor]:
        """The gradients that a graph captured meanwhile writes to: still there, or written."""
        return [
            grad
            for tensor, grad, version in self._grads
            if grad is not None and (tensor.grad is grad or _version(grad) != version)
        ]

    def put_back(self) -> None:
        """Put all of it back."""
        for tensor, grad, _ in self._grads:
            tensor.grad = grad
        for owner, name, value in self._records:
            setattr(owner, name, value)


def _version(grad: torch.Tensor | None) -> int:
    return 0 if grad is None or grad.is_inference() else grad._version


def _copied(value: Any) -> Any:
    """Copy what is written in place."""
    return copy.copy(value) if isinstance(value, (list, set)) else value
