"""What rank 0 alone has loaded for its optimizers and loss scalers, given to all ranks.

A wrapper sends rank 0's parameters to all ranks; it knows no optimizer. amp does. Ranks compare
what they have, a few numbers, and only where they differ rank 0's state dicts are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apex.amp import checkpoint, registry
from apex.amp.casting.containers import applier
from apex.amp.optimizer import state_of


def share_state(weights: Sequence[torch.Tensor], group: Any) -> None:
    """Give all ranks the optimizer state and loss scale of the first one, where theirs differ.

    Args:
        weights: Model parameters, in the same order on every rank. It is about the optimizers under
            amp that step them.
        group: A process group.

    Raises:
        RuntimeError: Another rank has optimizer state, and the first one has none.
    """
    optimizers = _optimizers_of(weights)
    if not optimizers:
        return
    mine = [_describe(optimizer) for optimizer in optimizers]
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, mine, group=group)
    if all(one == every[0] for one in every):
        return
    has_state = [[described[0] for described in one] for one in every]
    late = [rank for rank, one in enumerate(has_state) if any(map(_exceeds, one, has_state[0]))]
    if late:
        raise RuntimeError(
            f"amp: ranks {late} have optimizer state (from a checkpoint?), and rank 0 has none. "
            "Load a checkpoint on all ranks, or on rank 0 alone."
        )
    sent: list[Any] = [[_state(optimizer) for optimizer in optimizers]]
    source = torch.distributed.get_global_rank(group, 0)
    torch.distributed.broadcast_object_list(sent, source, group=group)
    if torch.distributed.get_rank() != source:
        for optimizer, (state, scalers) in zip(optimizers, sent[0], strict=True):
            optimizer.load_state_dict(state)
            checkpoint.load_state_dict(scalers, optimizers=optimizer)


def _exceeds(one: bool, other: bool) -> bool:
    return one and not other


def _optimizers_of(weights: Sequence[torch.Tensor]) -> list[Any]:
    """The optimizers under amp that step some of ``weights``, in the order of these."""
    places = {id(weight): place for place, weight in enumerate(weights)}
    found = []
    for optimizer in registry.managed():
        state = state_of(optimizer)
        targets = [] if state is None or state.superseded else state.ledger.params.targets
        mine = sorted(places[id(t)] for t in targets if id(t) in places)
        if mine:
            found.append((mine, optimizer))
    return [optimizer for _, optimizer in sorted(found, key=lambda item: item[0])]


def _describe(optimizer: Any) -> tuple[bool, str, str]:
    plain = (bool, int, float, str, tuple, torch.Tensor)
    groups = [
        {key: value for key, value in group.items() if isinstance(value, plain)}
        for group in optimizer.param_groups
    ]
    scalers = checkpoint.state_dict(optimizers=optimizer)
    return bool(optimizer.state), repr(groups), repr(scalers)


def _state(optimizer: Any) -> tuple[Any, Any]:
    def to_cpu(value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) else value

    state = applier(optimizer.state_dict(), to_cpu)
    return state, checkpoint.state_dict(optimizers=optimizer)
