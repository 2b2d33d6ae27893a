"""What a model's forward pre-hook tells about gradients: each model has a record of its own.

As a training forward begins, the scaled gradients that passes have left on 16-bit weights are
cleared, masters are made equal on all ranks, and it is noted whether torch's
DistributedDataParallel will reduce the gradients of this forward.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._compile import _disable_dynamo

from apex.amp.gradients import distributed
from apex.amp.gradients.masters import Pairs


class ForwardRecord:
    """The last training forward of one model. A copied or unpickled model has a record of its own.

    Args:
        is_cast: Whether the model is cast to 16 bits, so that it may have masters.

    Attributes:
        synchronises: Whether DistributedDataParallel reduces the gradients in backward: ``False``
            under ``no_sync()``, ``None`` outside of a DistributedDataParallel.
        to_clear: Whose gradients on 16-bit weights are to be cleared before the next one.
    """

    def __init__(self, is_cast: bool) -> None:
        self._is_cast = is_cast
        self.synchronises: bool | None = None
        self.to_clear: weakref.WeakSet[Pairs] = weakref.WeakSet()
        self._wrapper: weakref.ref[Any] | None = None  # the last DistributedDataParallel

    def __deepcopy__(self, memo: Any) -> ForwardRecord:
        return ForwardRecord(self._is_cast)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardRecord, (self._is_cast,)

    def begin(self, model: torch.nn.Module) -> None:
        """Note that a training forward of ``model`` begins."""
        while self.to_clear:
            self.to_clear.pop().clear_taken()
        wrapper = distributed.active_wrapper()
        self.synchronises = None if wrapper is None else bool(wrapper.require_backward_grad_sync)
        if wrapper is not None and (self._wrapper is None or self._wrapper() is not wrapper):
            distributed.broadcast_masters(model, wrapper)
            self._wrapper = weakref.ref(wrapper)

    def begin_compiled(self, model: torch.nn.Module) -> None:
        """The same where Dynamo traces the forward; only what must run as Python breaks the graph.

        Scaled gradients are not cleared here: the next ``scale_loss`` block does it.
        """
        wrapper = distributed.active_wrapper()
        self.synchronises = None if wrapper is None else bool(wrapper.require_backward_grad_sync)
        if wrapper is not None and self._is_cast and self._wrapper is None:
            _begin(self, model)


@_disable_dynamo  # torch.compiler.disable would import Dynamo now
def _begin(record: ForwardRecord, model: torch.nn.Module) -> None:
    record.begin(model)
