"""Collectives on flat tensors, and the groups in which optimizers and wrappers reduce gradients.

Collectives are ``torch.distributed``'s; nothing here imports it before a process group exists.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from apex._compat import ALL_GATHER, REDUCE_SCATTER, private

__all__ = [
    "all_gather",
    "gradient_group",
    "new_gradient_group",
    "ranks_agree",
    "reduce_scatter",
    "wait",
]

# Backends of torch's that reduce and gather whole tensors alone.
WITHOUT_SHARDS = {"mpi"}

# A process group -> another one of the same ranks, in which only gradients are reduced.
_gradient_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def gradient_group(group: Any, device: torch.device) -> Any:
    """The process group for the gradients of all wrappers of ``group``; all its ranks call this."""
    if group not in _gradient_groups:
        _gradient_groups[group] = new_gradient_group(group, device)
    return _gradient_groups[group]


def new_gradient_group(group: Any, device: torch.device) -> Any:
    """Make a process group of the ranks of ``group``, all of which call this.

    Ranks start to reduce gradients at different moments of a backward pass, so these must not be
    mixed up with other collectives, such as those of SyncBatchNorm's backward.
    """
    options = None
    with contextlib.suppress(RuntimeError):  # a group of GPUs, a module of none
        options = getattr(private.get_backend(group, device), "options", None)
    is_world = group is torch.distributed.group.WORLD
    return torch.distributed.new_group(
        torch.distributed.get_process_group_ranks(group),
        timeout=getattr(options, "_timeout", None),
        backend=torch.distributed.get_backend(group),
        use_local_synchronization=not is_world,  # others do not know of this group
    )


def reduce_scatter(shard: torch.Tensor, flat: torch.Tensor, group: Any) -> Any:
    """Begin to sum ``flat`` over the ranks of ``group``; each gets its part of the sums.

    Args:
        shard: ``(n,)``: written.
        flat: ``(n * ranks,)``; may be written. Both must live until :func:`wait` returns.
        group: The ranks.

    Returns:
        What :func:`wait` waits for.
    """
    if torch.distributed.get_backend(group) not in WITHOUT_SHARDS:
        return getattr(torch.distributed, REDUCE_SCATTER)(shard, flat, group=group, async_op=True)
    torch.distributed.all_reduce(flat, group=group)
    start = torch.distributed.get_rank(group) * shard.numel()
    shard.copy_(flat[start : start + shard.numel()])
    return None


def all_gather(flat: torch.Tensor, shard: torch.Tensor, group: Any) -> Any:
    """Begin to collect the ``shard`` of each rank of ``group`` in ``flat``.

    Args:
        flat: ``(n * ranks,)``: written.
        shard: ``(n,)``; may be this rank's part of ``flat``.
        group: The ranks.

    Returns:
        What :func:`wait` waits for.
    """
    if torch.distributed.get_backend(group) not in WITHOUT_SHARDS:
        return getattr(torch.distributed, ALL_GATHER)(flat, shard, group=group, async_op=True)
    parts = [*torch.split(flat, shard.numel())]
    torch.distributed.all_gather(parts, shard.clone(), group=group)
    return None


def wait(work: Any, user: str, *tensors: torch.Tensor) -> None:
    """Wait for a collective; on a GPU the current stream does.

    Args:
        work: What began it.
        user: Who asks, for the message.
        *tensors: What it reads and writes, perhaps made on another stream.

    Raises:
        RuntimeError: It failed.
    """
    try:
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"{user}: a collective failed. Has another rank ended, failed, or run fewer backward "
            "passes or steps? Give every rank the same number of batches (DistributedSampler "
            f"does), and look at the output of the other ranks. {error}"
        ) from error
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def ranks_agree(described: Sequence[Any], group: Any, device: torch.device, message: str) -> None:
    """Raise on all ranks where a description is not the same on all.

    Args:
        described: What must be equal; parts have a ``repr``.
        group: The ranks.
        device: One that the backend of ``group`` can send from.
        message: The error's, with ``{rank}``, ``{other}`` and ``{first}``: a rank that differs from
            rank 0, and the first differing parts of both.

    Raises:
        RuntimeError: Ranks differ.
    """
    number = zlib.crc32(repr([*described]).encode())
    mine = torch.tensor([number], device=device, dtype=torch.int64)
    all_ = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(all_, mine, group=group)
    if all(one.item() == all_[0].item() for one in all_):
        return
    every: list[Any] = [None] * len(all_)
    torch.distributed.all_gather_object(every, list(map(str, described)), group)
    rank = next(rank for rank, one in enumerate(every) if one != every[0])
    both = list(zip_longest(every[0], every[rank], fillvalue="nothing"))
    first, other = next(pair for pair in both if pair[0] != pair[1])
    raise RuntimeError(message.format(rank=rank, other=other, first=first))
