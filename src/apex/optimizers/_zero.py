"""Torch's ``ZeroRedundancyOptimizer``, whose ranks each step whole parameters, but not all of them.

It makes an optimizer of this rank's parameters, which is not told so. Norms of single tensors are
right there. The norm of all gradients is not: an optimizer that clips by it has to add up over the
ranks. So when an optimizer is made, the calls that are running are looked at.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple

import torch

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"
_MAKES = "_init_local_optimizer"  # as torch 2.13 calls the method; tests notice another name


class Partition(NamedTuple):
    """Where the other parameters are.

    Attributes:
        group: The process group whose ranks step them.
        device: Of the parameters, also on a rank that has none.
    """

    group: Any
    device: torch.device


def partition() -> Partition | None:
    """The ranks that a ``ZeroRedundancyOptimizer`` is making an optimizer for, if one is."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return None
    # The caller's: a frame that is in a local of its own keeps the locals of all callers alive.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is vars(module) and frame.f_code.co_name == _MAKES:
            maker = frame.f_locals["self"]
            return Partition(maker.join_process_group, maker.join_device)
        frame = frame.f_back
    return None
