"""Memory that NCCL allocates and registers, so that its collectives need no extra copies."""

from apex.contrib.nccl_allocator.nccl_allocator import (
    create_nccl_mem_pool,
    init,
    nccl_mem,
    register_mem_pool,
)

__all__ = ["create_nccl_mem_pool", "init", "nccl_mem", "register_mem_pool"]
