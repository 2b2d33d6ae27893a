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
    """The training forwards of one model. A copied or unpickled model has a record of its own.

    Args:
        is_cast: Whether the model is cast to 16 bits, so that it may have masters.

    Attributes:
        synchronises: Whether DistributedDataParallel reduces the gradients of the forwards since
            the last pass: ``False`` if one ran under ``no_sync()``, ``None`` if all ran outside of
            a DistributedDataParallel.
        reduces_all: Whether that is done for the whole model, and over all ranks.
        to_clear: Whose gradients on 16-bit weights are to be cleared before the next forward.
    """

    def __init__(self, is_cast: bool) -> None:
        self._is_cast = is_cast
        self.synchronises: bool | None = None
        self.reduces_all = False
        self.to_clear: weakref.WeakSet[Pairs] = weakref.WeakSet()
        self._passed = False  # whether a pass has used what is noted
        self._wrapper: weakref.ref[Any] | None = None  # the last DistributedDataParallel around it
        self._inside: list[Any] | None = None  # those inside of the model

    def __deepcopy__(self, memo: Any) -> ForwardRecord:
        return ForwardRecord(self._is_cast)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardRecord, (self._is_cast,)

    def begin(self, model: torch.nn.Module) -> None:
        """Note that a forward of ``model`` begins."""
        if torch._C._current_graph_task_id() != -1:  # a backward pass recomputes it
            return
        if torch.is_grad_enabled():
            while self.to_clear:
                self.to_clear.pop().clear_taken()
        elif not model.training:  # with gradients off it may be about to be recomputed
            return
        if not distributed.is_initialized():
            return
        wrapper = distributed.active_wrapper()
        if self._inside is None:
            self._inside = distributed.wrappers_inside(model)
            for inner in self._inside:
                distributed.broadcast_masters(inner.module, inner)
        if wrapper is not None and (self._wrapper is None or self._wrapper() is not wrapper):
            distributed.broadcast_masters(model, wrapper)
            self._wrapper = weakref.ref(wrapper)
        if self._is_cast and wrapper is not None:
            distributed.refuse_join(wrapper)
        wrappers = [*self._inside, *([] if wrapper is None else [wrapper])]
        self._note([bool(one.require_backward_grad_sync) for one in wrappers])
        self.reduces_all = wrapper is not None and distributed.has_all_ranks(wrapper)

    def begin_compiled(self, model: torch.nn.Module) -> None:
        """The same where Dynamo traces the forward; only what must run as Python breaks the graph.

        Scaled gradients are not cleared here: the next ``scale_loss`` block does it.
        """
        wrapper = distributed.active_wrapper()
        if wrapper is not None and self._is_cast and self._wrapper is None:
            _begin(self, model)
        self._note([] if wrapper is None else [bool(wrapper.require_backward_grad_sync)])

    def _note(self, flags: list[bool]) -> None:
        if self._passed:
            self.synchronises, self._passed = None, False
        if flags:
            self.synchronises = all(flags) and self.synchronises is not False

    def end_pass(self) -> None:
        """Note that a pass has used what is noted."""
        self._passed = True


@_disable_dynamo  # torch.compiler.disable would import Dynamo now
def _begin(record: ForwardRecord, model: torch.nn.Module) -> None:
    record.begin(model)
