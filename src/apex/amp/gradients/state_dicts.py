"""State-dict hooks of a model cast to 16 bits: its ``state_dict`` is in float32.

An entry shows the float32 master where a weight has one, and loading takes float32 values unrounded
into the masters. So the ordinary state dicts lose nothing. Reading changes nothing: a weight that
the program has written shows what was written, and its master gets that at the next step.
"""

from __future__ import annotations

from typing import Any

import torch

from apex.amp.gradients.masters import table
from apex.amp.policy import HALF_TYPES


class ShowFloat32:
    """State-dict hook: 16-bit entries of the module itself become float32 copies."""

    def __call__(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Replace entries of ``state`` that begin with ``prefix``."""
        own = {**module._parameters, **module._buffers}
        for name, weight in own.items():
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or value.dtype not in HALF_TYPES:
                continue
            if isinstance(value, torch.nn.Parameter):  # keep_vars=True asked for the weight
                continue
            master = table.get(weight)
            if weight is not None and master is not None:
                value = master.value_for(weight)
            state[prefix + name] = value.float().detach()


class LoadFloat32:
    """Before loading, keep the float32 values at hand; after it, give them to the masters."""

    def __init__(self) -> None:
        self.pending: dict[str, torch.Tensor] = {}

    def __deepcopy__(self, memo: Any) -> LoadFloat32:
        return LoadFloat32()

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadFloat32, ()

    def before(
        self,
        module: torch.nn.Module,
        state: dict[str, Any],
        prefix: str,
        *rest: Any,
    ) -> None:
        """Note the entries of ``state`` that have a master waiting."""
        self.pending = {
            name: state[prefix + name]
            for name, weight in module._parameters.items()
            if weight is not None
            and table.get(weight) is not None
            and isinstance(state.get(prefix + name), torch.Tensor)
        }

    def after(self, module: torch.nn.Module, incompatible: Any) -> None:
        """Hand each noted value to its master, if it is what was loaded."""
        pending, self.pending = self.pending, {}
        for name, value in pending.items():
            weight = module._parameters[name]
            master = None if weight is None else table.get(weight)
            if weight is not None and master is not None and value.shape == weight.shape:
                master.load(weight, value)
