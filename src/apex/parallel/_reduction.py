"""The reduction of gradients over ranks, by hooks on parameters: the engine of the wrapper.

Hooks on parameters tell when a gradient is complete; what is still missing when the backward pass
ends is reduced then. So nothing depends on which forwards ran, and how many: several forwards or
backwards for a step, unused, frozen, unfrozen and cast parameters are reduced like any other.
Every byte is moved by a collective of ``torch.distributed``.

* **Buckets.** Parameters are grouped in the order in which their gradients arrived in the first
  pass on rank 0, ``message_size`` elements or more of one dtype and device to a bucket. A complete
  bucket is reduced while the backward pass goes on, but never before those in front of it, so that
  all ranks call their collectives in the same order.
* **Unused parameters.** A bucket ends with one number for each parameter: whether a rank has its
  gradient. Ranks that have none contribute zeros, and get the mean. Where no rank has one,
  ``.grad`` stays ``None``.

Why not the reducer of torch's DistributedDataParallel: each forward has to tell it that a backward
will follow, so that second backwards stay unreduced; it fails on unused parameters, or walks the
graph for them; and it does not survive a cast of its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from apex.ops.flat import broadcast, unflatten
from apex.parallel._bucket import Bucket

_NARROW = (torch.float16, torch.bfloat16)

# Parameter -> a weak reference to the reduction whose hook it has. A parameter has one hook.
_owners: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of the wrapper, see :class:`apex.parallel.DistributedDataParallel`.

    Attributes:
        triggers: Indices of parameters that end a bucket each, instead of ``message_size``.
    """

    message_size: int
    triggers: frozenset[int]
    delay: bool
    retain: bool
    always_fp32: bool
    average: bool
    predivide: float


@dataclass(eq=False, slots=True)
class _Pass:
    """One backward pass.

    Attributes:
        end: A weak reference to the callback at its end; dead if the pass has failed.
        reduces: Whether its gradients are reduced at all.
        arrived: Indices of parameters, in the order of their gradients; some may come twice.
        missing: The indices that each bucket waits for; empty where buckets wait for the end.
        started: The buckets on their way; ``None`` for one without trainable parameters.
    """

    end: weakref.ref[Any]
    reduces: bool
    arrived: list[int] = field(default_factory=list)
    missing: list[set[int]] = field(default_factory=list)
    started: list[Bucket | None] = field(default_factory=list)


class Reduction:
    """Reduces the gradients of a module's parameters in every backward pass.

    Args:
        module: The module.
        group: The process group.
        options: See there.

    Attributes:
        enabled: Whether passes reduce whose forward did not run in the wrapper.
        starts_equal: Whether the wrapper has made parameters equal since they could be loaded.
        retained: The reduced buckets of the last pass, with ``options.retain``.
    """

    def __init__(self, module: torch.nn.Module, group: Any, options: Options) -> None:
        self.module = module
        self.group = group
        self.options = options
        self.enabled = True
        self.starts_equal = False
        self.retained: list[torch.Tensor] = []
        self.world = torch.distributed.get_world_size(group)
        self.buckets: list[list[int]] | None = None
        self._params: list[torch.nn.Parameter] = []
        self._hooks: dict[int, Any] = {}  # by the id of a parameter
        self._kinds: list[Any] = []  # dtype and device of each parameter, when buckets were made
        self._bucket_of: dict[int, int] = {}
        self._made: dict[int, Bucket] = {}  # by number
        self._overlaps = True
        self._pass: _Pass | None = None
        self._sums: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        weakref.finalize(self, _remove, self._hooks)
        self.refresh()

    def refresh(self) -> None:
        """Look at the module's parameters again, and put hooks on those that are trained.

        Raises:
            RuntimeError: A backward pass failed after it had begun to communicate.
        """
        self._forget_failed()
        params = list(self.module.parameters())
        if len(params) != len(self._params) or any(
            new is not old for new, old in zip(params, self._params, strict=True)
        ):
            _remove(self._hooks)
            self._params, self.buckets = params, None
        for index, param in enumerate(params):
            if id(param) not in self._hooks and param.requires_grad:
                self._take(index, param)

    def _forget_failed(self) -> None:
        if self._pass is None or self._pass.end() is not None:
            return
        failed, self._pass = self._pass, None
        if any(failed.started):
            raise RuntimeError(
                "DistributedDataParallel: an earlier backward pass failed after it had reduced a "
                "part of the gradients, so ranks are out of step. Restart the job from its last "
                "checkpoint."
            )

    def _take(self, index: int, param: torch.nn.Parameter) -> None:
        before = _owners.get(param)
        owner = None if before is None else before()
        if owner is not None and owner is not self:
            owner._hooks.pop(id(param)).remove()
        this = weakref.ref(self)

        def hook(param: torch.Tensor) -> None:
            reduction = this()
            if reduction is not None:
                reduction.ready(index)

        handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._hooks[id(param)] = handle
        _owners[param] = this

    def _is_mine(self, index: int) -> bool:
        param = self._params[index]
        return param.requires_grad and id(param) in self._hooks

    # -- one backward pass ---------------------------------------------------------------------

    def begin(self, reduces: bool) -> _Pass:
        """Note that a backward pass has begun.

        Called from a gradient of the wrapper's output, it waits for the end of the whole pass; from
        that of a parameter inside of reentrant checkpointing, for the end of the inner pass.

        Args:
            reduces: Whether one of its forwards asked for a reduction.
        """
        self._forget_failed()
        one = self._pass
        if one is None:

            def end() -> None:
                self._finish()

            one = self._pass = _Pass(weakref.ref(end), reduces)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            if self.buckets is not None and self._kinds != self._find_kinds():
                self.buckets = None
            if self.buckets is not None and self._overlaps and not self.options.delay:
                one.missing = [set(filter(self._is_mine, bucket)) for bucket in self.buckets]
        one.reduces = one.reduces or reduces
        return one

    def ready(self, index: int) -> None:
        """Note that the gradient of a parameter is complete, and start complete buckets.

        Args:
            index: Of the parameter.

        Raises:
            RuntimeError: The gradient cannot be reduced.
        """
        one = self._pass
        if one is None or one.end() is None:
            one = self.begin(self.enabled)
        param = self._params[index]
        if self._sums:
            self._check_sum(param)
        if not one.reduces:
            return
        if param.grad is None:
            raise RuntimeError(
                f"DistributedDataParallel: another hook has taken the gradient of "
                f"{self._name(param)} before it was reduced (an optimizer that steps in the "
                "backward pass?). Take gradients after the backward pass."
            )
        one.arrived.append(index)
        if not one.missing:
            return
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
        one, self._pass = self._pass, None
        if one is None or not one.reduces or not one.arrived:
            return
        self._pass = one  # an error on the way leaves it to be seen by refresh
        if self.buckets is None:
            self.learn(one.arrived)
        assert self.buckets is not None
        for number in range(len(one.started), len(self.buckets)):
            one.started.append(self._start(number))
        self.retained = []
        for bucket in one.started:
            if bucket is not None:
                self._end(bucket)
        broadcast(list(self.module.buffers()), self.group)
        if not self.starts_equal:
            self._check_equal()
        self._pass = None

    def _check_equal(self) -> None:
        """Compare the bits of parameters over ranks, once, where no training forward was first."""
        self.starts_equal = True
        sums = [param.detach().reshape(-1).view(torch.uint8).sum() for param in self._params]
        mine = torch.stack([one.to(self.device()) for one in sums])
        every = [torch.empty_like(mine) for _ in range(self.world)]
        torch.distributed.all_gather(every, mine, group=self.group)
        if any(not torch.equal(one, every[0]) for one in every):
            raise RuntimeError(
                "DistributedDataParallel: parameters differ between ranks. Load a checkpoint on "
                "all ranks, or before wrapping; what rank 0 alone loads later is sent with the "
                "first forward in train(), and there was none."
            )

    # -- buckets -------------------------------------------------------------------------------

    def _find_kinds(self) -> list[Any]:
        return [(param.dtype, param.device) for param in self._params]

    def learn(self, arrived: Sequence[int]) -> None:
        """Make buckets in the order in which gradients arrived on rank 0.

        Args:
            arrived: Indices of parameters on this rank. A parameter that arrives twice, as with
                reentrant checkpointing, counts the last time, and nothing is reduced early.
        """
        order = list(dict.fromkeys(reversed(arrived)))[::-1]
        self._overlaps = len(order) == len(arrived)
        rest = set(range(len(self._params))).difference(order)
        numbers = torch.tensor([*order, *sorted(rest, reverse=True)], device=self.device())
        broadcast([numbers], self.group)
        self._kinds = self._find_kinds()
        full, growing = [], dict[Any, list[int]]()
        sizes: dict[Any, int] = {}
        triggers = self.options.triggers
        for index in numbers.tolist():
            kind = self._kinds[index]
            growing.setdefault(kind, []).append(index)
            sizes[kind] = sizes.get(kind, 0) + self._params[index].numel()
            if index in triggers if triggers else sizes[kind] >= self.options.message_size:
                full.append(growing.pop(kind))
                sizes[kind] = 0
        self.buckets = [*full, *growing.values()]
        self._bucket_of = {i: number for number, b in enumerate(self.buckets) for i in b}
        self._made = {}

    @torch.no_grad()
    def _start(self, number: int) -> Bucket | None:
        """Send the gradients of a bucket on their way."""
        assert self.buckets is not None
        params = [self._params[index] for index in self.buckets[number] if self._is_mine(index)]
        if not params:
            return None
        for param in params:
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"DistributedDataParallel: the gradient of {self._name(param)} has layout "
                    f"{param.grad.layout}; only dense ones are reduced. Make the layer with "
                    "sparse=False."
                )
        bucket = self._made.get(number)
        if bucket is None or [*map(id, bucket.params)] != [*map(id, params)]:
            dtype = params[0].dtype
            wide = self.options.always_fp32 and dtype in _NARROW
            bucket = Bucket(params, torch.float32 if wide else dtype)
            if not self.options.retain:  # gradients become views of its memory
                self._made[number] = bucket
        bucket.fill()
        bucket.work = self.start(bucket.flat, len(params))
        return bucket

    def start(self, flat: torch.Tensor, flags: int = 0) -> Any:
        """Begin to sum ``flat`` over ranks; its last ``flags`` numbers are not divided before."""
        if self.options.predivide != 1.0:
            flat[: flat.numel() - flags].mul_(1.0 / self.options.predivide)
        return torch.distributed.all_reduce(flat, group=self.group, async_op=True)

    def end(self, work: Any, flat: torch.Tensor, flags: int = 0) -> torch.Tensor:
        """Wait for a sum; return it without its ``flags``, divided as the options say."""
        work.wait()
        if flat.is_cuda:  # made on the stream of the backward pass
            flat.record_stream(torch.cuda.current_stream(flat.device))
        values = flat[: flat.numel() - flags]
        if self.options.average:
            values.mul_(self.options.predivide / self.world)
        return values

    def _end(self, bucket: Bucket) -> None:
        """Write the reduced gradients of a bucket back."""
        self.end(bucket.work, bucket.flat, len(bucket.params))
        bucket.work = None
        bucket.write_back()
        if self.options.retain:
            values = bucket.values.to(bucket.params[0].dtype)
            self.retained.append(values)
            for param, view in zip(bucket.params, unflatten(values, bucket.params), strict=True):
                param.grad = None if param.grad is None else view
        if not self.options.average:
            for param in bucket.params:
                if param.grad is not None:
                    self._sums[id(param)] = weakref.ref(param.grad), param.grad._version

    def _check_sum(self, param: torch.nn.Parameter) -> None:
        """Raise where a gradient was added to a sum over ranks, which would be summed again."""
        sum_, version = self._sums.pop(id(param), (lambda: None, 0))
        grad = param.grad
        if grad is not None and sum_() is grad and grad._version == version + 1:
            raise RuntimeError(
                "DistributedDataParallel: gradient_average=False, and a backward pass has added to "
                f"the gradient of {self._name(param)}, which is a sum over ranks already. "
                "Accumulate in no_sync() until the last backward of a step, and zero gradients "
                "after the step."
            )

    # -- what is said of parameters ------------------------------------------------------------

    def device(self) -> torch.device:
        """Where the module is: that of its first parameter or buffer."""
        for tensor in (*self._params, *self.module.buffers()):
            return tensor.device
        return torch.device("cpu")

    def index_of(self, param: torch.nn.Parameter) -> int:
        """The index of a parameter of the module."""
        return next(index for index, one in enumerate(self._params) if one is param)

    def _name(self, param: torch.Tensor) -> str:
        names = (name for name, one in self.module.named_parameters() if one is param)
        return f"parameter '{next(names, '?')}'"


def _remove(hooks: dict[int, Any]) -> None:
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
