"""What Python holds of a step, to be put back after a capture that has failed in the middle of one.

Nothing was computed, so memory is as before. But gradients are tensors that nothing has filled, and
amp's records are those of a step that has not been taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apex.amp.gradients.masters import table
from apex.amp.optimizer import OptimizerState


class Snapshot:
    """Gradients, and amp's records of gradients and masters."""

    def __init__(self, states: Sequence[OptimizerState]) -> None:
        weights = [weight for state in states for weight in state.params.targets]
        masters = [master for weight in weights if (master := table.get(weight)) is not None]
        tensors = [*weights, *(master.tensor for master in masters)]
        self._grads = [(tensor, tensor.grad) for tensor in tensors]
        self._masters = [(m, m.taken, m.taken_version, {*m.waiting}) for m in masters]
        self._ledgers = [(state.ledger, _fields(state.ledger)) for state in states]
        self._params = [(s.params, s.params.are_freed, s.params.exposed) for s in states]

    def kept_gradients(self) -> list[Any]:
        """The gradients that are still there, so that a graph captured meanwhile writes to them."""
        return [grad for tensor, grad in self._grads if grad is not None and tensor.grad is grad]

    def put_back(self) -> None:
        """Put all of it back."""
        for tensor, grad in self._grads:
            tensor.grad = grad
        for master, taken, version, waiting in self._masters:
            master.taken, master.taken_version, master.waiting = taken, version, waiting
        for ledger, fields in self._ledgers:
            vars(ledger).update(fields)
        for params, are_freed, exposed in self._params:
            params.are_freed, params.exposed = are_freed, exposed


def _fields(ledger: Any) -> dict[str, Any]:
    """The fields of a ledger; its lists are written in place."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(ledger).items()
    }
