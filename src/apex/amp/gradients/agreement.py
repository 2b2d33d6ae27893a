"""One decision on an overflow for all ranks that hold parts of one model.

With tensor, pipeline or sharded parallelism a rank has gradients of its own, and an overflow may be
in those of one rank alone. So the flag of a pass is reduced, MAX, before the scaler and the step
look at it: over the process group of ``amp.initialize(process_group=...)``, and over the mesh of
every parameter that is a DTensor (``fully_shard``, ``parallelize_module``). Scales and steps of
these ranks then stay equal. The flag stays on its device, so on a GPU nothing waits.

Ranks whose numbers of collectives differ wait for each other forever. Therefore, with a process
group, no reduction depends on which gradients a rank has. They follow from the calls of the program
alone: one in each ``step`` or ``zero_grad`` after a ``scale_loss`` block, one more at the end of a
block with ``delay_overflow_check``. All ranks have to make these calls in the same order. Of
DTensors the ranks of a mesh have gradients of the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from apex.amp.gradients import distributed
from apex.amp.gradients.forwards import ForwardRecord
from apex.ops.columns import OWN_MEMORY


def agree_(found_inf: torch.Tensor, ledgers: Iterable[Any]) -> torch.Tensor:
    """Set ``found_inf`` to 1, in place, if it is 1 on one of the ranks that share a model.

    Args:
        found_inf: Flag of this rank, float32, 0-dim.
        ledgers: Those of the optimizers whose gradients it is about.

    Returns:
        ``found_inf``.
    """
    if not distributed.several_ranks():
        return found_inf
    for group in _groups(ledgers):
        torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX, group=group)
    return found_inf


def _groups(ledgers: Iterable[Any]) -> list[Any]:
    """The process groups of more than one rank to reduce over, in the same order on every rank."""
    groups: list[Any] = []
    for ledger in ledgers:
        weights = ledger.params.targets
        if not OWN_MEMORY.issuperset(map(type, weights)):
            parallel: list[Any] = [weight for weight in weights if hasattr(weight, "device_mesh")]
            for mesh in dict.fromkeys(weight.device_mesh for weight in parallel):
                groups += [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        if ledger.training.process_group is not None:
            groups.append(ledger.training.process_group)
    return list(dict.fromkeys(groups))


def are_reduced(records: list[ForwardRecord]) -> bool:
    """Whether a DistributedDataParallel reduces the gradients of a pass, if there is one."""
    used = [record for record in records if not record.is_used] or records
    return not any([record.synchronises is False for record in used])


def is_final(ledgers: Iterable[Any], records: Iterable[ForwardRecord]) -> bool:
    """Whether nothing can change the flag of a pass after its block.

    That is so with one rank, and where a DistributedDataParallel over all ranks has reduced all
    gradients. With a ``process_group`` it is never so, because it could be so on some of its ranks
    only: they would reduce at the end of the block, and the others in the step.

    Args:
        ledgers: Those of the optimizers in the block.
        records: Of the forwards of their models.
    """
    if any(ledger.training.process_group is not None for ledger in ledgers):
        return False
    by_ddp = all(ledger.belongs_to_models for ledger in ledgers)
    by_ddp = by_ddp and all(record.synchronises and record.reduces_all for record in records)
    return by_ddp or not distributed.several_ranks()


def may_forget(ledger: Any, *, had_grads: bool) -> bool:
    """Whether passes of a ledger without gradients may be forgotten: the program has cleared them.

    Args:
        ledger: Of one optimizer.
        had_grads: Whether its passes have left gradients on this rank.

    Raises:
        RuntimeError: With a ``process_group``, if they have: ranks whose passes left none cannot
            see that.
    """
    if ledger.training.process_group is None:
        return True
    if had_grads:
        raise RuntimeError(
            "amp: gradients were cleared without a step, and not by optimizer.zero_grad(). With "
            "amp.initialize(process_group=...) all ranks must clear them alike, so that their "
            "loss scales stay equal. Call optimizer.zero_grad() on every rank to drop a batch."
        )
    return False
