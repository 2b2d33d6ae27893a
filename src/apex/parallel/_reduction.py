"""The reduction of gradients over ranks, by hooks on parameters: the engine of the wrapper.

Hooks on parameters are called when a gradient is complete. What is still missing when the backward
pass ends is reduced then. So nothing depends on which forwards ran, and how many.

* **Buckets.** Parameters are grouped in the order in which their gradients arrived in the first
  pass on rank 0, ``message_size`` elements or more of one dtype and device to a bucket. A complete
  bucket is reduced while the backward pass goes on, but never before those in front of it.
* **Order of collectives.** Ranks that use other parameters start their buckets at other moments of
  the pass. So gradients have a process group of their own, without other collectives (such as those
  of SyncBatchNorm's backward), and of several wrappers in one backward pass only the first starts
  buckets early. So do modules on one device only, because autograd has a thread for each.
* **Unused parameters.** A bucket ends with one number for each parameter: whether a rank has its
  gradient. Ranks that have none contribute zeros, and get the mean. Where no rank has one,
  ``.grad`` stays ``None``.

Why not the reducer of torch's DistributedDataParallel: each forward has to announce that a backward
will follow, so that second backwards stay unreduced; it fails on unused parameters, or walks the
graph for them; and it does not survive a cast of its parameters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from apex._compat import private
from apex.ops.lists.flat import broadcast, group_by_size, unflatten
from apex.parallel._bucket import AllReduce, BackwardPass, Bucket, Reducing

# Parameter -> a weak reference to the reduction whose hook it has. A parameter has one hook.
_owners: Any = WeakTensorKeyDictionary()
_passes: weakref.WeakSet[BackwardPass] = weakref.WeakSet()  # those that run, of all wrappers
_lock = threading.RLock()  # autograd has a thread for each device


def _owner(param: torch.nn.Parameter) -> Reduction | None:
    reference = _owners.get(param)
    owner: Reduction | None = None if reference is None else reference()
    return owner


class Reduction:
    """Reduces the gradients of a module's parameters in every backward pass.

    Args:
        gradient_group: The ranks of ``group``, for gradients alone.

    Attributes:
        enabled: Whether passes are to reduce now.
        starts_equal: Whether the wrapper has made parameters equal since they could be loaded.
        retained: The reduced buckets of the last pass, with ``options.retain``.
    """

    def __init__(
        self, module: torch.nn.Module, group: Any, gradient_group: Any, options: Reducing
    ) -> None:
        self.module = module
        self.group = group
        self.options = options
        self.enabled = True
        self.starts_equal = False
        self.retained: list[torch.Tensor] = []
        self.world = torch.distributed.get_world_size(group)
        self.all_reduce = AllReduce(gradient_group, options)
        self.buckets: list[list[int]] | None = None
        self._params: list[torch.nn.Parameter] = []
        self._hooks: dict[int, Any] = {}  # by the id of a parameter
        self._kinds: list[Any] = []  # dtype and device of parameters, when buckets were made
        self._bucket_of: dict[int, int] = {}
        self._overlaps = True
        self._pass: BackwardPass | None = None
        self._has_failed = False
        self._sums: dict[int, weakref.ref[torch.Tensor]] = {}  # by the id of a parameter
        weakref.finalize(self, _remove, self._hooks)
        self.refresh()

    def refresh(self) -> None:
        """Look at the module's parameters again, and put hooks on those that are trained.

        Parameters that ``torch.func.functional_call`` has put in their place are passed over.
        """
        self._look_for_failure()
        params = list(self.module.parameters())
        if not all(isinstance(param, torch.nn.Parameter) and param.is_leaf for param in params):
            return
        if list(map(id, params)) != list(map(id, self._params)):
            _remove(self._hooks)
            self._params, self.buckets = params, None
            self.starts_equal = False
        for index, param in enumerate(params):
            if id(param) not in self._hooks and param.requires_grad:
                self._take(index, param)

    def _look_for_failure(self) -> None:
        """Notice a pass that has ended without its callback. Other ranks may have taken part."""
        if self._pass is not None and self._pass.end() is None:
            self._has_failed |= self._pass.reduces and self.world > 1
            self._pass = None
        if self._has_failed:
            raise RuntimeError(
                "DistributedDataParallel: a backward pass failed on this rank, so the ranks no "
                "longer make the same collective calls. Restart the job from its last checkpoint. "
                "If the pass failed on all ranks, you can instead wrap the module again."
            )

    def _take(self, index: int, param: torch.nn.Parameter) -> None:
        owner = _owner(param)
        theirs = None if owner is None else owner._hooks.pop(id(param), None)
        if theirs is not None:
            theirs.remove()
        this = weakref.ref(self)

        def hook(param: torch.Tensor) -> None:
            reduction = this()
            if reduction is not None:
                reduction.ready(index)

        handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._hooks[id(param)] = handle
        _owners[param] = this

    def _is_trained(self, index: int) -> bool:
        param = self._params[index]
        return param.requires_grad and id(param) in self._hooks

    # -- one backward pass ---------------------------------------------------------------------

    def begin(self, reduces: bool) -> BackwardPass:
        """Note that a backward pass has begun; ``reduces``: a forward of it asked for a reduction.

        Called from a gradient of the wrapper's output, it waits for the end of the whole pass; from
        that of a parameter inside of reentrant checkpointing, for the end of the inner pass.
        """
        with _lock:
            self._look_for_failure()
            self._pass = self._pass or self._new_pass()
            self._pass.reduces |= reduces or self.enabled
            return self._pass

    def _new_pass(self) -> BackwardPass:
        def end() -> None:
            self._finish()

        private.execution_engine.queue_callback(end)
        one = BackwardPass(weakref.ref(end))
        for index, param in enumerate(self._params):  # called past the wrapper, unfrozen since
            if id(param) not in self._hooks and param.requires_grad and not _owner(param):
                self._take(index, param)
        if self._kinds != self._find_kinds():
            self.buckets = None
        is_first = not any(other.missing and other.end() is not None for other in _passes)
        if self.buckets and self._overlaps and is_first and not self.options.delay:
            one.missing = [set(filter(self._is_trained, bucket)) for bucket in self.buckets]
        if self._sums:
            one.sums = self._find_sums()
        _passes.add(one)
        return one

    def ready(self, index: int) -> None:
        """Note that the gradient of a parameter is complete, and start complete buckets."""
        with _lock:
            self._ready(index)

    def _ready(self, index: int) -> None:
        one = self._pass
        if one is None or one.end() is None:
            one = self.begin(self.enabled)
        param = self._params[index]
        if id(param) in one.sums:
            raise RuntimeError(
                "DistributedDataParallel: gradient_average=False, and a backward pass added to the "
                f"gradient of {self._name(param)}, which is already a sum over ranks. Accumulate "
                "in no_sync() until the last backward of a step, and zero gradients after the "
                "step."
            )
        if not one.reduces:
            return
        one.arrived.append(index)
        if not one.missing:
            return
        one.order.follow(param.device)
        assert self.buckets is not None
        number, next_ = self._bucket_of[index], len(one.started)
        if number < next_:
            raise RuntimeError(
                f"DistributedDataParallel: {self._name(param)} got a gradient again "
                "in this backward pass after it was reduced (reentrant checkpointing of a shared "
                "parameter?). Use delay_allreduce=True, or checkpoint with use_reentrant=False."
            )
        one.missing[number].discard(index)
        while next_ < len(self.buckets) and not one.missing[next_]:
            one.started.append(self._start(next_))
            next_ += 1

    @torch.no_grad()
    def _finish(self) -> None:
        """Reduce what is left, and write everything back: the end of the pass."""
        one = self._pass
        assert one is not None
        if one.reduces and one.arrived:
            self._reduce_rest(one)
        self._pass = None

    def _reduce_rest(self, one: BackwardPass) -> None:
        if self.buckets is None:
            self.learn(one.arrived)
        assert self.buckets is not None
        for number in range(len(one.started), len(self.buckets)):
            one.started.append(self._start(number))
        self.retained = []
        for bucket in one.started:
            if bucket is not None:
                self._end(bucket)
        if self.options.broadcast_buffers:
            broadcast(list(self.module.buffers()), self.group)

    # -- buckets -------------------------------------------------------------------------------

    def _find_kinds(self) -> list[Any]:
        return [(param.dtype, param.device) for param in self._params]

    def learn(self, arrived: Sequence[int]) -> None:
        """Make buckets in the order in which gradients of parameters ``arrived`` on rank 0.

        One that arrives twice (reentrant checkpointing) counts the last time, and nothing is
        reduced early.
        """
        order = list(dict.fromkeys(reversed(arrived)))[::-1]
        one_device = len({param.device for param in self._params}) == 1
        self._overlaps = len(order) == len(arrived) and one_device
        rest = set(range(len(self._params))).difference(order)
        every = [*order, *sorted(rest, reverse=True)]
        numbers = torch.tensor(every, device=self.device(), dtype=torch.int64)
        broadcast([numbers], self.group)
        self._kinds = self._find_kinds()
        self.buckets = group_by_size(
            numbers.tolist(), self._params, self.options.message_size, self.options.triggers
        )
        self._bucket_of = {i: number for number, b in enumerate(self.buckets) for i in b}

    @torch.no_grad()
    def _start(self, number: int) -> Bucket | None:
        """Send the gradients of a bucket on their way."""
        assert self.buckets is not None
        assert self._pass is not None
        params = [self._params[index] for index in self.buckets[number] if self._is_trained(index)]
        if not params:
            return None
        dtype = params[0].dtype
        bucket = Bucket(params, self.options.dtype_of(dtype))
        refused = bucket.fill(self._pass.sums)
        if refused is not None and refused.grad is not None:
            raise RuntimeError(
                f"DistributedDataParallel: the gradient of {self._name(refused)} is "
                f"{refused.grad.dtype} with layout {refused.grad.layout}; only dense gradients of "
                f"the parameter's dtype, {dtype}, can be reduced. Make an embedding with "
                "sparse=False."
            )
        bucket.work = self.all_reduce.begin(bucket.flat, len(params))
        return bucket

    def _end(self, bucket: Bucket) -> None:
        """Write the reduced gradients of a bucket back."""
        self.all_reduce.end(bucket.work, bucket.flat, len(bucket.params))
        self._check_taken(bucket)
        bucket.write_back()
        if self.options.retain:
            values = bucket.values.to(bucket.params[0].dtype)
            self.retained.append(values)
            for param, view in zip(bucket.params, unflatten(values, bucket.params), strict=True):
                param.grad = None if param.grad is None else view
        if not self.options.average:
            for param in bucket.params:
                if param.grad is not None:
                    self._sums[id(param)] = weakref.ref(param.grad)

    def _check_taken(self, bucket: Bucket) -> None:
        """Raise where a gradient of this pass is gone."""
        lost = bucket.lost()
        if not lost and not bucket.has_all and self._pass is not None:
            arrived = {id(self._params[index]) for index in self._pass.arrived}
            lost = [p for p in bucket.params if p.grad is None and id(p) in arrived]
        if lost:
            raise RuntimeError(
                "DistributedDataParallel: another hook removed the gradient of "
                f"{self._name(lost[0])} before the reduction (an optimizer that steps in the "
                "backward pass?). Use gradients after the backward pass."
            )

    def _find_sums(self) -> set[int]:
        """Ids of parameters whose gradients are sums over ranks and not zero; waits for a GPU."""
        grads = {id(param): param.grad for param in self._params if id(param) in self._sums}
        return {
            key
            for key, grad in grads.items()
            if grad is not None and self._sums[key]() is grad and bool(grad.any())
        }

    def device(self) -> torch.device:
        """Where the module is: that of its first parameter or buffer."""
        for tensor in (*self._params, *self.module.buffers()):
            return tensor.device
        return torch.device("cpu")

    def _name(self, param: torch.Tensor) -> str:
        names = (name for name, one in self.module.named_parameters() if one is param)
        return f"parameter '{next(names, '?')}'"


def _remove(hooks: dict[int, Any]) -> None:
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
