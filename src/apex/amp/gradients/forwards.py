"""What a model's forward pre-hook tells about gradients: each model has a record of its own.

As a training forward begins, the scaled gradients that passes have left on 16-bit weights are
cleared, masters are made equal on all ranks, and it is noted whether torch's
DistributedDataParallel will reduce the gradients of this forward.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from apex.amp.gradients import distributed
from apex.amp.gradients.masters import Pairs


class ForwardRecord:
    """The last training forward of one model. A copied or unpickled model has a record of its own.

    Attributes:
        synchronises: Whether DistributedDataParallel reduces the gradients in backward: ``False``
            under ``no_sync()``, ``None`` outside of a DistributedDataParallel.
        to_clear: Whose gradients on 16-bit weights are to be cleared before the next one.
    """

    def __init__(self) -> None:
        self.synchronises: bool | None = None
        self.to_clear: weakref.WeakSet[Pairs] = weakref.WeakSet()
        self._wrapper: weakref.ref[Any] = weakref.ref(self)  # the last one seen; itself for none

    def __deepcopy__(self, memo: Any) -> ForwardRecord:
        return ForwardRecord()

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardRecord, ()

    def begin(self, model: torch.nn.Module) -> None:
        """Note that a training forward of ``model`` begins."""
        while self.to_clear:
            self.to_clear.pop().clear_taken()
        wrapper = distributed.active_wrapper()
        self.synchronises = None
        if wrapper is not None:
            self.synchronises = bool(wrapper.require_backward_grad_sync)
            if self._wrapper() is not wrapper:
                distributed.broadcast_masters(model, wrapper)
                self._wrapper = weakref.ref(wrapper)
