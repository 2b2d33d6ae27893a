"""What ranks decide together, so that none waits for one that does something else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from apex._compat import private

WAIT = timedelta(seconds=60)
dist = torch.distributed


def _is_up() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_parallel() -> bool:
    """Whether this process is one of several ranks."""
    return _is_up() and dist.get_world_size() > 1


def is_first() -> bool:
    """Whether this process is the only one or rank 0, also when its process group has ended."""
    return dist.get_rank() == 0 if _is_up() else os.environ.get("RANK") in (None, "", "0")


def _groups(tensors: Iterable[Any], group: Any) -> list[Any]:
    """The process groups over which a decision is shared: ``group``, or those of DTensors."""
    if group is not None or not _is_up():
        return [] if group is None else [group]
    meshes = {id(t.device_mesh): t.device_mesh for t in tensors if hasattr(t, "device_mesh")}
    return [g for mesh in meshes.values() for g in mesh.get_all_groups()]


def agree(found: torch.Tensor, tensors: Sequence[Any], group: Any = None) -> torch.Tensor:
    """The largest ``found`` of the ranks that share ``tensors``; those alone are asked.

    All ranks of a group pass tensors of the same groups and devices: parameters, whose gradients
    may be missing on one of them. NCCL reduces no tensor of a CPU, and gloo those of each device.
    """
    groups = _groups(tensors, group)
    if groups:
        devices = [tensor.device for tensor in tensors]
        found = found.to(next((one for one in devices if one.type != "cpu"), found.device))
    for each in groups:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=each)
    return found


class Together:
    """The ranks that explain a fault at the same time.

    Args:
        models: Their parameters say whether a replay needs other ranks.
        group: The ranks that hold parts of one model, or ``None``.
        name: Of the fault, the same on all ranks.
    """

    def __init__(self, models: list[torch.nn.Module], group: Any, name: str) -> None:
        self._params = [param for model in models for param in model.parameters()]
        self._group, self._name, self._attempts = group, name, 0
        self._alone = False  # others did not come to explain
        self.is_parallel = is_parallel()
        self.rank = dist.get_rank() if self.is_parallel else None
        kinds = {type(module).__name__ for model in models for module in model.modules()}
        synchronised = any("SyncBatchNorm" in kind for kind in kinds)
        self.needs_others = synchronised or bool(_groups(self._params, group))

    def are_here(self) -> bool:
        """Whether all ranks came to explain the fault, within a minute."""
        if not self.is_parallel:
            return True
        store = private.get_default_store()
        self._attempts += 1
        common = f"apex.debug/{self._name}/{self._attempts}"
        names = [f"{common}/{rank}" for rank in range(dist.get_world_size())]
        store.set(names[dist.get_rank()], "here")
        try:
            store.wait(names, WAIT)
        except (RuntimeError, ValueError):  # torch's DistStoreError, of a time-out
            self._alone = True
        return not self._alone

    def any(self, found: bool) -> bool:
        """Whether ``found`` on one of the ranks that replay together."""
        if self._alone or not self.needs_others:
            return found
        device = next((p.device for p in self._params), "cpu")
        flag = torch.tensor(float(found), device=device, dtype=torch.float32)
        return bool(agree(flag, self._params, self._group))

    def exchange(self, value: Any) -> list[Any]:
        """What each rank gave, in the order of ranks."""
        if not self.is_parallel:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values
