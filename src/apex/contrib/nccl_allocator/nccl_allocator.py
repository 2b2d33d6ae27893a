"""Pools of NCCL's memory, over the allocator that PyTorch's NCCL backend has.

New programs use ``torch.distributed._symmetric_memory``, for which NVIDIA deprecates this.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch

from apex._compat import private

dist = torch.distributed


def init() -> None:
    """Set two environment variables for NCCL and PyTorch. Call it before making process groups."""
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] = "0"


def _backend(name: str, group: Any = None) -> Any:
    """The NCCL backend of a group, by default of the world."""
    found: Any = None
    if torch.cuda.is_available() and dist.is_available() and dist.is_initialized():
        private.need("nccl_allocator")
        group = dist.group.WORLD if group is None else group
        if "cuda" in {device.type for device in group._device_types}:
            found = private.get_backend(group, torch.device("cuda"))
    if not hasattr(found, "mem_allocator"):
        raise RuntimeError(
            f"nccl_allocator.{name} needs a GPU and an NCCL process group; there is "
            f"{'no GPU' if not torch.cuda.is_available() else 'no such group'}. Call "
            'torch.distributed.init_process_group("nccl") first, or pass enabled=False to '
            "nccl_mem."
        )
    return found


def create_nccl_mem_pool(symmetric: bool | None = None) -> Any:
    """Make a ``torch.cuda.MemPool`` that uses NCCL's allocator.

    Args:
        symmetric: Whether the memory has the same layout on all ranks. This needs a release of
            torch whose ``MemPool`` has the argument.

    Raises:
        RuntimeError: There is no GPU or no NCCL process group, or this torch does not support
            ``symmetric``.
    """
    allocator = _backend("create_nccl_mem_pool").mem_allocator
    if not symmetric:
        return torch.cuda.MemPool(allocator)
    if "symmetric" not in inspect.signature(torch.cuda.MemPool).parameters:
        raise RuntimeError(
            f"create_nccl_mem_pool: torch {torch.__version__} cannot make a symmetric pool. Leave "
            "symmetric out, or use torch.distributed._symmetric_memory."
        )
    return torch.cuda.MemPool(allocator, symmetric=True)  # type: ignore[call-arg]


def register_mem_pool(pool: Any, group: Any = None) -> None:
    """Register a pool's memory with the NCCL backend of a group, by default of the world.

    Raises:
        RuntimeError: There is no GPU, or the group does not use NCCL.
    """
    _backend("register_mem_pool", group).register_mem_pool(pool)


@contextlib.contextmanager
def nccl_mem(
    pool: Any, enabled: bool = True, device: Any = None, group: Any = None
) -> Iterator[None]:
    """Allocate from a pool inside a ``with`` block, and register the pool with a group at its end.

    Args:
        pool: A pool made by :func:`create_nccl_mem_pool`.
        enabled: ``False`` makes the block do nothing.
        device: The GPU whose allocations come from the pool; by default the current one.
        group: The group to register the memory with; by default the world.

    Raises:
        RuntimeError: At the start of the block: there is no GPU, or the group does not use NCCL.
    """
    if not enabled:
        yield
        return
    backend = _backend("nccl_mem", group)
    with torch.cuda.use_mem_pool(pool, device):
        yield
    backend.register_mem_pool(pool)  # a segment that is registered already is left alone
