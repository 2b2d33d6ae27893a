"""What ran in the forwards of a model and of DistributedDataParallel around it, or in it.

A :class:`ForwardRecord` says who will reduce the gradients of the next backward. As a training
forward begins, it reconciles masters and weights, and clears what passes have left.

**Ranks start equal.** Torch's wrapper copies the 16-bit weights of rank 0 to all ranks when it is
made; masters could still differ in their low bits. So the masters of rank 0, float32 weights and
the loss scales are broadcast at the first training forward inside a wrapper.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from apex._compat import private
from apex.amp.gradients.masters import table
from apex.amp.gradients.parameters import Pairs
from apex.ops.lists import flat

# Whether a process group was made; some builds of torch have none.
is_initialized: Callable[[], bool] = getattr(torch.distributed, "is_initialized", lambda: False)

_active: list[Any] = []  # the wrappers of apex whose forwards run now; torch keeps its own


def several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return is_initialized() and torch.distributed.get_world_size() > 1


# -- wrappers --------------------------------------------------------------------------------------


def _reduces_all(wrapper: Any) -> bool:
    """Whether a wrapper reduces everything, over all ranks, in the usual way."""
    if getattr(wrapper, "parameters_to_ignore", ()) or getattr(wrapper, "_comm_hooks", ()):
        return False
    size = torch.distributed.get_world_size
    return size(wrapper.process_group) == size()


def is_wrapper(module: Any) -> bool:
    """Whether ``module`` is a DistributedDataParallel, of torch or of apex."""
    torchs = getattr(torch.nn.parallel, "DistributedDataParallel", ())
    return isinstance(module, torchs) or hasattr(type(module), "require_backward_grad_sync")


@contextlib.contextmanager
def inside(wrapper: Any) -> Iterator[None]:
    """Make ``wrapper``, of apex, the active one while its module's forward runs."""
    _active.append(wrapper)
    try:
        yield
    finally:
        _active.pop()


def _active_wrapper() -> Any:
    """The wrapper whose forward runs now, if any."""
    if not is_initialized():
        return None
    if _active:
        return _active[-1]
    return private.get_active_ddp_module()


def _refuse_join(wrapper: Any) -> None:
    """Raise inside of ``wrapper.join()``, whose end writes the 16-bit weights of one rank."""
    if getattr(getattr(wrapper, "_join_config", None), "enable", False):
        raise RuntimeError(
            "amp: join() of DistributedDataParallel was called with a model that is cast to 16 "
            "bits. join() ends with a broadcast of 16-bit weights, which would not reach the "
            "masters. Use O1 or O4, or give all ranks the same number of inputs."
        )


# -- ranks start equal -----------------------------------------------------------------------------


@torch.no_grad()
def broadcast_parameters(weights: Sequence[torch.Tensor], group: Any) -> None:
    """Give all ranks of ``group`` the first one's masters, and weights that equal them.

    ``weights`` with and without masters are in the same order on every rank.
    """
    masters = [table.get(weight) for weight in weights]
    rows = [(w, m) for w, m in zip(weights, masters, strict=True) if m is not None]
    for weight, master in rows:
        master.refresh(weight)
        master.before = None
    both = zip(weights, masters, strict=True)
    flat.broadcast([w if master is None else master.tensor for w, master in both], group)
    for weight, master in rows:  # .data: a forward may have saved the weight for its backward
        weight.data.copy_(master.tensor)
    Pairs(rows).record()


def _broadcast_scales(scalers: Sequence[Any], device: torch.device, group: Any) -> None:
    """Give all ranks of ``group`` the first one's loss scales and their counts."""
    counts = [len(scalers), -len(scalers)]
    number = torch.tensor(counts, device=device, dtype=torch.int64)
    torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=group)
    most, least = number[0].item(), -number[1].item()
    if most != least:
        raise RuntimeError(
            f"amp: ranks passed different num_losses to amp.initialize: from {least} to {most}; "
            f"this rank passed {len(scalers)}. Pass the same number on every rank."
        )
    numbers = [scaler.numbers.clone().to(device) for scaler in scalers]
    flat.broadcast(numbers, group)
    for scaler, received in zip(scalers, numbers, strict=True):
        scaler.take(received)


# -- forwards --------------------------------------------------------------------------------------


class ForwardRecord:
    """The forwards of one model. A copied or unpickled model has a record of its own.

    As a training forward begins, masters and weights are reconciled, the scaled gradients that
    passes have left on 16-bit weights are cleared, and who will reduce the gradients is recorded.

    Attributes:
        is_cast: Whether the model is cast to 16 bits, so that it may have masters.
        training: A weak reference to the training of the model, once there is one.
        synchronises: Whether DistributedDataParallel reduces the next backward. It does if one
            forward with gradients since the last reduction ran outside of ``no_sync()``. ``None``
            where no forward ran inside of a DistributedDataParallel.
        has_buckets: Whether it keeps gradients as parts of its buckets.
        reduces_all: Whether it reduces the whole model, over all ranks, in the usual way.
        is_used: Whether a pass has ended since the last forward.
        is_compiled: Whether Dynamo has traced a forward: there masters are not reconciled.
        has_taken: By id, whose gradients on 16-bit weights the next forward clears.
        exposed: By id, whose masters count as written until the next forward.
        may_have_left: Whether a step was skipped, or may have been, whose gradients the program may
            clear without amp's knowledge, by ``model.zero_grad()``.
        is_replayed: Whether apex.debug runs a forward again, which must change nothing.
    """

    def __init__(self, is_cast: bool) -> None:
        self.is_cast = is_cast
        self.training: Any = None
        self.synchronises: bool | None = None
        self.reduces_all = self.has_buckets = False
        self.is_used = True
        self.is_compiled = self.is_replayed = self.may_have_left = False
        self.has_taken: dict[int, Pairs] = {}
        self.exposed: dict[int, Pairs] = {}
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._pairs = Pairs([])  # of the model
        self._masters = self._pairs.masters
        self._changes = -1  # of the table, when they were looked up
        self._had_grad = True  # whether the last recorded forward was one with gradients
        self._traced: bool | None = None  # what a compiled forward has recorded
        self._was_traced = False
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # every DistributedDataParallel
        self._inside: weakref.WeakSet[Any] | None = None  # those that are parts of the model
        self._pending: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []  # model and wrapper

    def __deepcopy__(self, memo: Any) -> ForwardRecord:
        return ForwardRecord(self.is_cast)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardRecord, (self.is_cast,)

    def begin(self, model: torch.nn.Module) -> None:
        """Note that a forward of ``model`` begins."""
        if self.is_replayed or private.current_graph_task_id() != -1:  # recomputed by a backward
            return
        if self.is_cast:
            if self._model is None and not getattr(model, "_is_replica", False):
                self._model = weakref.ref(model)
            while self.exposed:
                self.exposed.popitem()[1].exposed = False
            self.reconcile()
        if torch.is_grad_enabled():
            while self.has_taken:
                self.has_taken.popitem()[1].clear_taken()
            if self.may_have_left:
                self._forget_left()
        elif not model.training:  # with gradients off it may be about to be recomputed
            return
        if is_initialized():
            self._note_wrappers(model)

    def _forget_left(self) -> None:
        """Forget skipped steps whose gradients are gone: a backward may leave others soon."""
        training = None if self.training is None else self.training()
        ledgers = [] if training is None else [one for one in training.ledgers() if one.left.passes]
        self.may_have_left = not all([ledger.forget_left() for ledger in ledgers])

    def reconcile(self) -> None:
        """Call :meth:`.parameters.Pairs.reconcile` for all weights of the model."""
        model = None if self._model is None else self._model()
        is_old = self._changes != table.changes or self._pairs.masters is not self._masters
        if is_old and model is not None:
            self._changes = table.changes
            both = [(w, table.get(w)) for w in (*model.parameters(), *model.buffers())]
            rows = [(weight, master) for weight, master in both if master is not None]
            training = None if self.training is None else self.training()
            for ledger in () if training is None else training.ledgers():
                if set(ledger.params.masters) == {master for _, master in rows}:
                    self._pairs = ledger.params  # notes of its own would have to be compared
                    break
            else:
                self._pairs = Pairs(rows)
            self._masters = self._pairs.masters  # an optimizer's groups may change
        if self._pairs.weights:
            self._pairs.reconcile(may_return=not torch.is_grad_enabled())

    def _note_wrappers(self, model: torch.nn.Module) -> None:
        around = _active_wrapper()
        if self._inside is None:
            self._inside = weakref.WeakSet([m for m in model.modules() if is_wrapper(m)])
        for inside in self._inside:
            self._see(inside.module, inside)
        if around is not None:
            self._see(model, around)
            if self.is_cast:
                _refuse_join(around)
        wrappers = [*self._inside, *([] if around is None else [around])]
        views = [getattr(one, "gradient_as_bucket_view", False) for one in wrappers]
        self.has_buckets = any(views)
        if not wrappers:
            self.synchronises = None if self.is_used else self.synchronises
            return
        self._note(all([one.require_backward_grad_sync for one in wrappers]))
        self.reduces_all = around is not None and _reduces_all(around)

    def _see(self, model: torch.nn.Module, wrapper: Any) -> None:
        """Have ranks made equal for a new wrapper: now, or when a pass begins.

        A forward in evaluation may be one of this rank alone.
        """
        if wrapper not in self._seen:
            self._seen.add(wrapper)
            self._pending.append((weakref.ref(model), weakref.ref(wrapper)))
        if self._pending and model.training and torch.is_grad_enabled():
            self._make_equal()

    def _make_equal(self) -> None:
        """Make masters and loss scales equal on all ranks, where that has not been done."""
        pending, self._pending = self._pending, []
        training = None if self.training is None else self.training()
        for model, wrapper in ((one(), other()) for one, other in pending):
            if model is None or wrapper is None:
                continue
            ignored = getattr(wrapper, "parameters_to_ignore", ())
            named = wrapper.module.named_parameters()
            left_out = {id(parameter) for name, parameter in named if name in ignored}
            weights = [weight for weight in model.parameters() if id(weight) not in left_out]
            if any(map(table.get, weights)):  # else the wrapper has copied all bits
                broadcast_parameters(weights, wrapper.process_group)
            if training is not None and weights:
                _broadcast_scales(training.loss_scalers, weights[0].device, wrapper.process_group)

    def begin_compiled(self, model: torch.nn.Module) -> None:
        """The same where Dynamo traces the forward; only what must run as Python breaks the graph.

        Nothing is read here that passes change, so that no forward is compiled again for it. The
        next ``zero_grad``, block or step reconciles masters and clears scaled gradients.
        """
        self.is_compiled = True
        wrapper = _active_wrapper()
        if wrapper is not None:
            if not self._was_traced:  # ranks are made equal
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
        if self._pending:
            self._make_equal()
        if self._traced is not None:
            traced, self._traced = self._traced, None
            self._note(traced)


@private.disable_dynamo  # torch.compiler.disable would import Dynamo now
def _begin(record: ForwardRecord, model: torch.nn.Module) -> None:
    record.begin(model)


def are_reduced(records: Sequence[ForwardRecord]) -> bool:
    """Whether DistributedDataParallel reduces the gradients of a pass now, where there is one."""
    used = [record for record in records if not record.is_used] or records
    return not any([record.synchronises is False for record in used])


def is_final(ledgers: Sequence[Any], records: Sequence[ForwardRecord]) -> bool:
    """Whether nothing can change the flag of a pass after its block.

    That is so with one rank, and where a DistributedDataParallel over all ranks has reduced all
    gradients. With a ``process_group`` it is never so: it could be on some of its ranks only.
    """
    if any([ledger.training.process_group is not None for ledger in ledgers]):
        return False
    by_wrapper = not any([ledger.params.outside for ledger in ledgers]) and all(
        [record.synchronises and record.reduces_all for record in records]
    )
    return by_wrapper or not several_ranks()
