"""What amp notes at each forward of a model, for its gradients: one record for each model.

As a training forward begins, the scaled gradients that passes have left on 16-bit weights are
cleared, masters are made equal on all ranks, and it is noted whether a
DistributedDataParallel, torch's or apex's, will reduce the gradients.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._compile import _disable_dynamo

from apex.amp.gradients import distributed
from apex.amp.gradients.masters import Pairs, table


class ForwardRecord:
    """The forwards of one model. A copied or unpickled model has a record of its own.

    Args:
        is_cast: Whether the model is cast to 16 bits, so that it may have masters.

    Attributes:
        synchronises: Whether DistributedDataParallel reduces the next backward. It does if one
            forward with gradients since the last reduction ran outside of ``no_sync()``. ``None``
            where no forward ran inside of a DistributedDataParallel.
        reduces_all: Whether it reduces the whole model, over all ranks, in the usual way.
        is_used: Whether a pass has ended since the last forward.
        has_taken: By id, whose gradients on 16-bit weights are to be cleared before the next forward.
        handed_out: By id, whose masters count as written until the next forward.
    """

    def __init__(self, is_cast: bool) -> None:
        self._is_cast = is_cast
        self.synchronises: bool | None = None
        self.reduces_all = False
        self.is_used = True
        self.has_taken: dict[int, Pairs] = {}
        self.handed_out: dict[int, Pairs] = {}
        self._pairs = Pairs([], [])  # of the model
        self._model: weakref.ref[Any] | None = None
        self._changes = table.changes
        self._had_grad = True  # whether the last noted forward was one with gradients
        self._traced: bool | None = None  # what a compiled forward has noted
        self._was_traced = False
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # every DistributedDataParallel
        self._inside: weakref.WeakSet[Any] | None = None  # those that are parts of the model
        self._pending: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []  # model and wrapper

    def __deepcopy__(self, memo: Any) -> ForwardRecord:
        return ForwardRecord(self._is_cast)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardRecord, (self._is_cast,)

    def begin(self, model: torch.nn.Module) -> None:
        """Note that a forward of ``model`` begins."""
        if torch._C._current_graph_task_id() != -1:  # a backward pass recomputes it
            return
        if self._is_cast:
            self._look(model)
        if torch.is_grad_enabled():
            while self.has_taken:
                self.has_taken.popitem()[1].clear_taken()
        elif not model.training:  # with gradients off it may be about to be recomputed
            return
        if distributed.is_initialized():
            self._look_at_wrappers(model)

    def _look(self, model: torch.nn.Module) -> None:
        """Bring what others have written to masters and weights of ``model`` to both of them."""
        if self._model is None and not getattr(model, "_is_replica", False):
            self._model = weakref.ref(model)
            self._changes = -1
        self.reconcile()
        while self.handed_out:
            self.handed_out.popitem()[1].handed_out = False

    def reconcile(self) -> None:
        """See :meth:`apex.amp.gradients.masters.Pairs.reconcile`, of all weights of the model."""
        model = None if self._model is None else self._model()
        if self._changes != table.changes and model is not None:
            self._changes = table.changes
            both = ((w, table.get(w)) for w in (*model.parameters(), *model.buffers()))
            rows = [(weight, master) for weight, master in both if master is not None]
            self._pairs = Pairs([weight for weight, _ in rows], [master for _, master in rows])
        if self._pairs.weights:
            self._pairs.reconcile()

    def _look_at_wrappers(self, model: torch.nn.Module) -> None:
        around = distributed.active_wrapper()
        if self._inside is None:
            self._inside = weakref.WeakSet(distributed.wrappers_inside(model))
        for inside in self._inside:
            self._see(inside.module, inside)
        if around is not None:
            self._see(model, around)
            if self._is_cast:
                distributed.refuse_join(around)
        wrappers = [*self._inside, *([] if around is None else [around])]
        if not wrappers:
            self.synchronises = None if self.is_used else self.synchronises
            return
        self._note(all(one.require_backward_grad_sync for one in wrappers))
        self.reduces_all = around is not None and distributed.reduces_all(around)

    def _see(self, model: torch.nn.Module, wrapper: Any) -> None:
        """Have masters broadcast for a new wrapper: now, or when a pass begins.

        A forward in evaluation may be one of this rank alone.
        """
        if wrapper not in self._seen:
            self._seen.add(wrapper)
            self._pending.append((weakref.ref(model), weakref.ref(wrapper)))
        if model.training and torch.is_grad_enabled():
            self.broadcast()

    def broadcast(self) -> None:
        """Make masters equal on all ranks, where that has not been done."""
        pending, self._pending = self._pending, []
        for model, wrapper in ((one(), other()) for one, other in pending):
            if model is not None and wrapper is not None:
                distributed.broadcast_masters(model, wrapper)

    def begin_compiled(self, model: torch.nn.Module) -> None:
        """The same where Dynamo traces the forward; only what must run as Python breaks the graph.

        Nothing is read here that passes change, so that no forward is compiled again for it.
        Scaled gradients are not cleared: the next ``scale_loss`` block does it.
        """
        wrapper = distributed.active_wrapper()
        if wrapper is not None:
            if self._is_cast and not self._was_traced:
                _begin(self, model)
                self._was_traced = True
            self._traced = bool(wrapper.require_backward_grad_sync)

    def _note(self, synchronises: bool) -> None:
        has_grad = torch.is_grad_enabled()
        is_first = self.is_used or self.synchronises is None or (has_grad and not self._had_grad)
        if not is_first and not has_grad:
            return  # DistributedDataParallel does not count it
        self.synchronises = synchronises or (not is_first and bool(self.synchronises))
        self.is_used, self._had_grad = False, has_grad

    def begin_pass(self) -> None:
        """Note that a block begins, as it does on all ranks."""
        self.broadcast()
        if self._traced is not None:
            traced, self._traced = self._traced, None
            self._note(traced)

    def end_pass(self) -> None:
        """Note that a pass has used what is noted."""
        self.is_used = True


@_disable_dynamo  # torch.compiler.disable would import Dynamo now
def _begin(record: ForwardRecord, model: torch.nn.Module) -> None:
    record.begin(model)
