"""What a launch over lists of tensors reads besides the tensors: their sizes and addresses.

Both are uploaded from pinned memory without waiting; :mod:`apex.ops.lists.pointer_tables` keeps
them from step to step. Nothing here needs triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Elements of a program. It lives for some 50 us at this size on an H200, long against the two
# dependent table reads at its start, and a 10-million-weight model still makes more than a thousand
# programs. Derived, not yet tuned on a GPU.
CHUNK = 8192


class Layout:
    """Where programs work: what depends on the sizes of the tensors alone.

    Args:
        numels: Elements of each tensor; an empty one has no program.
        device: Where the kernel runs.
    """

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        blocks: list[int] = []
        firsts = [0]
        for tensor, numel in enumerate(numels):
            chunks = -(-numel // CHUNK)
            blocks += [tensor << 32 | chunk for chunk in range(chunks)]
            firsts.append(firsts[-1] + chunks)
        self.programs = len(blocks)
        self.tensors = len(firsts) - 1
        self.device = device
        hosts = [pinned(blocks, device), pinned(numels, device), pinned(firsts, device)]
        self.hosts = hosts  # a CUDA graph copies from there at each replay
        self.blocks, self.numels, self.firsts = (x.to(device, non_blocking=True) for x in hosts)


class Table:
    """The addresses of one column, on the device."""

    def __init__(self, addresses: Sequence[int], device: torch.device) -> None:
        self.aligned = all(address % 16 == 0 for address in addresses)
        self.hosts = [pinned(addresses, device)]  # a CUDA graph copies from there at each replay
        self.on_device = self.hosts[0].to(device, non_blocking=True)


def pinned(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Put the numbers where a copy to the device does not wait for it."""
    on_cuda = device.type == "cuda"
    return torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=on_cuda)
