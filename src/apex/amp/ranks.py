"""What rank 0 alone has loaded for its optimizers and loss scalers, given to all ranks.

A wrapper sends rank 0's parameters to all ranks; it knows no optimizer. amp does. Ranks compare
checksums of what they have, and only where these differ rank 0's state dicts are sent.
"""

from __future__ import annotations

import gc
import io
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from apex.amp import checkpoint
from apex.amp import training as registry
from apex.amp.casting.containers import applier
from apex.amp.optimizer import state_of


def share_state(weights: Sequence[torch.Tensor], group: Any) -> None:
    """Give all ranks the optimizer state and loss scale of the first one, where theirs differ.

    Every rank has to call it: there is a collective in any case.

    Args:
        weights: Model parameters, in the same order on every rank. It is about the optimizers under
            amp that step them.
        group: A process group.

    Raises:
        RuntimeError: Ranks have other optimizers, or another rank has optimizer state and the first
            one has none.
    """
    optimizers: list[Any] = []
    for collect in (False, True):
        if collect:  # an optimizer that went through initialize is part of a cycle
            optimizers = []
            gc.collect()
        optimizers = _optimizers_of(weights)
        mine = [_describe(optimizer) for optimizer in optimizers]
        every: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(every, mine, group=group)
        if all(one == every[0] for one in every):
            return
    if any(len(one) != len(every[0]) for one in every):
        raise RuntimeError(
            "amp: ranks passed different numbers of optimizers of this model to amp.initialize: "
            f"{[len(one) for one in every]}, from rank 0 on. Pass the same ones on every rank."
        )
    late = [
        rank
        for rank, one in enumerate(every)
        if any(has and not first for (has, *_), (first, *_) in zip(one, every[0], strict=True))
    ]
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


def _optimizers_of(weights: Sequence[torch.Tensor]) -> list[Any]:
    """The optimizers under amp that step some of ``weights``, in the order of these.

    Those of one ``initialize`` call that step the same weights are in the order of the call.
    """
    places = {id(weight): place for place, weight in enumerate(weights)}
    found = []
    for optimizer in registry.managed():
        state = state_of(optimizer)
        if state is None or state.superseded:
            continue
        mine = sorted(places[id(t)] for t in state.params.targets if id(t) in places)
        if mine:
            found.append((mine, state.training.ledgers().index(state.ledger), optimizer))
    return [optimizer for *_, optimizer in sorted(found, key=lambda item: item[:2])]


def _describe(optimizer: Any) -> tuple[bool, str, str, int]:
    """Whether it has state; its groups; its loss scales; a checksum of the state."""
    plain = (bool, int, float, str, tuple, torch.Tensor)
    groups = [
        {key: value for key, value in group.items() if isinstance(value, plain)}
        for group in optimizer.param_groups
    ]
    scalers = checkpoint.state_dict(optimizers=optimizer)
    checksum = 0

    def add(value: Any) -> Any:
        nonlocal checksum
        if isinstance(value, torch.Tensor):
            data = io.BytesIO()
            torch.save(value.detach().cpu().contiguous(), data)
            checksum = zlib.crc32(data.getvalue(), checksum)
        return value

    applier(optimizer.state_dict()["state"], add)
    return bool(optimizer.state), repr(groups), repr(scalers), checksum


def _state(optimizer: Any) -> tuple[Any, Any]:
    def to_cpu(value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) else value

    state = applier(optimizer.state_dict(), to_cpu)
    return state, checkpoint.state_dict(optimizers=optimizer)
