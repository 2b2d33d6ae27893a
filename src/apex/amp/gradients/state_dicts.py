"""State-dict hooks of a model cast to 16 bits: its ``state_dict`` is in float32.

An entry of a 16-bit weight is its float32 value, detached, which amp keeps: the master where an
optimizer steps one, else one that is made here (4 bytes an element) and kept until the weight is
written otherwise. So what programs write into entries (loaders of parts of a checkpoint, moving
averages of a copied model) reaches the weight at the next forward, step or ``state_dict``. Loading
takes float32 values unrounded into the masters. Where a weight is not its rounded master, since a
write was not seen, the entry is a copy of the weight, and reading changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from apex.amp.gradients.masters import Master, has_version, table
from apex.amp.gradients.parameters import Pairs
from apex.amp.gradients.tensors import is_rounded
from apex.amp.levels import HALF_TYPES


class ShowFloat32:
    """State-dict hook: 16-bit entries of the module itself become their float32 values."""

    def __call__(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Replace entries of ``state`` that begin with ``prefix``."""
        own = {**module._parameters, **module._buffers}
        for name, weight in own.items():
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or value.dtype not in HALF_TYPES:
                continue
            if weight is not None and not isinstance(value, torch.nn.Parameter):  # keep_vars=True
                state[prefix + name] = _entry(weight)


def _entry(weight: torch.Tensor) -> torch.Tensor:
    """The float32 value of ``weight`` that amp keeps; a copy where it is not known."""
    if not has_version(weight):
        return weight.detach().float()
    master = table.get(weight)
    if master is not None:
        Pairs([(weight, master)]).reconcile(may_return=True)
        master = table.get(weight)  # one that no optimizer steps was dropped if the weight changed
    if master is not None and not _is_rounded(master, weight):
        if master.is_stepped:
            return master.value_for(weight)
        table.pop(weight)
        master = None
    if master is None:
        master = table.add(weight, weight.detach().float(), is_stepped=False)
        Pairs([(weight, master)]).record()
    return master.tensor.detach()


def _is_rounded(master: Master, weight: torch.Tensor) -> bool:
    """Whether ``weight`` is its rounded master; waits for a device."""
    tensor = master.tensor
    return tensor.device == weight.device and (weight.is_meta or is_rounded(weight, tensor))


class LoadFloat32:
    """Before loading, note the float32 values; after it, give them to the masters."""

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
        """Hand each recorded value to its master, if it is what was loaded."""
        pending, self.pending = self.pending, {}
        for name, value in pending.items():
            weight = module._parameters[name]
            master = None if weight is None else table.get(weight)
            if weight is not None and master is not None and value.shape == weight.shape:
                master.load(weight, value)
                Pairs([(weight, master)]).record()
