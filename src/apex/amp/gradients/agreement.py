"""One decision on an overflow, for all ranks that hold parts of one model.

The overflow may be in the gradients of one rank alone. The flag of a pass is reduced, MAX, before
the scaler and the step read it: over the process group of ``amp.initialize(process_group=...)``,
and over the mesh of every parameter that is a DTensor. It stays on its device, so on a GPU nothing
waits. Ranks whose numbers of collectives differ wait for each other forever. So with a process
group reductions depend on the calls of the program alone, not on which gradients a rank has: one in
each ``step`` or ``zero_grad`` after a ``scale_loss`` block, one more at the end of a block with
``delay_overflow_check``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from apex import _compat
from apex.amp.gradients.forwards import several_ranks
from apex.ops.lists.tensor_lists import OWN_MEMORY


def agree_(found_inf: torch.Tensor, ledgers: Iterable[Any]) -> torch.Tensor:
    """Set ``found_inf`` to 1, in place, if it is 1 on one of the ranks that share a model.

    It is this rank's flag, float32, 0-dim, about the gradients of ``ledgers``.
    """
    if not several_ranks():
        return found_inf
    groups: list[Any] = []  # in the same order on every rank
    for ledger in ledgers:
        group = ledger.training.process_group
        groups += groups_of(root_meshes(ledger.params.targets, group), group)
    return agree_over_(found_inf, groups)


def root_meshes(params: Sequence[torch.Tensor], process_group: Any = None) -> list[Any]:
    """The root meshes of DTensors, but those all of whose ranks are in ``process_group``.

    The root: a weight that is sharded over ``mesh["tp"]`` alone has copies over the other
    dimensions, which have to take the same steps.
    """
    if OWN_MEMORY.issuperset(map(type, params)):
        return []
    parallel: list[Any] = [param for param in params if hasattr(param, "device_mesh")]
    meshes = dict.fromkeys(param.device_mesh for param in parallel)
    roots = [*dict.fromkeys(map(_compat.root_mesh, meshes))]
    if process_group is None:
        return roots
    ranks = {*torch.distributed.get_process_group_ranks(process_group)}
    return [root for root in roots if not ranks.issuperset(root.mesh.flatten().tolist())]


def groups_of(meshes: Iterable[Any], process_group: Any = None) -> list[Any]:
    """The process groups of more than one rank that decide together, one after the other."""
    groups = []
    for mesh in meshes:
        if mesh.get_coordinate() is not None:  # this rank is in it
            groups += [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    return groups if process_group is None else [*groups, process_group]


def agree_over_(found_inf: torch.Tensor, groups: Iterable[Any]) -> torch.Tensor:
    """Set a flag to the largest one of the ranks of ``groups``, in place; nothing waits."""
    for group in dict.fromkeys(groups):
        torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX, group=group)
    return found_inf


def may_forget(ledger: Any) -> bool:
    """Whether passes of a ledger without gradients may be forgotten: the program has cleared them.

    With a ``process_group`` it must not have: ranks where the last pass left none cannot see it.
    """
    if ledger.training.process_group is None:
        return True
    if ledger.had_grads:
        raise RuntimeError(
            "amp: gradients were cleared without a step, and not by optimizer.zero_grad(). With "
            "amp.initialize(process_group=...) all ranks must clear them together, so that their "
            "loss scales stay equal. Call optimizer.zero_grad() on every rank to drop a batch."
        )
    return False
