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

from apex.ops.flat import broadcast, flatten, unflatten

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
class _Started:
    """A bucket on its way: the gradients as they were, their flat copy, and the collective."""

    params: list[torch.nn.Parameter]
    grads: list[torch.Tensor | None]
    flat: torch.Tensor
    work: Any


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
    started: list[_Started | None] = field(default_factory=list)


class Reduction:
    """Reduces the gradients of a module's parameters in every backward pass.

    Args:
        module: The module.
        group: The process group.
        options: See there.

    Attributes:
        enabled: Whether passes reduce whose forward did not run in the wrapper.
        retained: The reduced buckets of the last pass, with ``options.retain``.
    """

    def __init__(self, module: torch.nn.Module, group: Any, options: Options) -> None:
        self.module = module
        self.group = group
        self.options = options
        self.enabled = True
        self.retained: list[torch.Tensor] = []
        self.world = torch.distributed.get_world_size(group)
        self.buckets: list[list[int]] | None = None
        self._params: list[torch.nn.Parameter] = []
        self._index: dict[int, int] = {}  # by the id of a parameter, like the next
        self._hooks: dict[int, Any] = {}
        self._kinds: list[Any] = []  # dtype and device of each parameter, when buckets were made
        self._bucket_of: dict[int, int] = {}
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
            self._index = {id(param): index for index, param in enumerate(params)}
        for param in params:
            if id(param) not in self._hooks and param.requires_grad:
                self._take(param)

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

    def _take(self, param: torch.nn.Parameter) -> None:
        before = _owners.get(param)
        owner = None if before is None else before()
        if owner is not None and owner is not self:
            owner._hooks.pop(id(param)).remove()
        this = weakref.ref(self)

        def hook(param: torch.Tensor) -> None:
            reduction = this()
            if reduction is not None:
                reduction.ready(param)

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

    @torch.no_grad()
    def ready(self, param: torch.Tensor) -> None:
        """Note that the gradient of ``param`` is complete, and start complete buckets.

        Raises:
            RuntimeError: The gradient cannot be reduced.
        """
        self._forget_failed()
        one = self._pass or self.begin(self.enabled)
        grad = param.grad
        if grad is None:  # another hook has taken it
            return
        if not self.options.average:
            self._check_sum(param, grad)
        if not one.reduces:
            return
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"DistributedDataParallel: the gradient of {self._name(param)} has layout "
                f"{grad.layout}; only dense ones are reduced. Make the layer with sparse=False."
            )
        index = self._index[id(param)]
        one.arrived.append(index)
        if not one.missing:
            return
        assert self.buckets is not None
        bucket = self._bucket_of[index]
        if bucket < len(one.started):
            raise RuntimeError(
                f"DistributedDataParallel: {self._name(param)} got a gradient again in this "
                "backward pass after it was reduced (reentrant checkpointing of a shared "
                "parameter?). Use delay_allreduce=True, or checkpoint with use_reentrant=False."
            )
        one.missing[bucket].discard(index)
        while len(one.started) < len(self.buckets) and not one.missing[len(one.started)]:
            one.started.append(self._start(self.buckets[len(one.started)]))

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
        for bucket in self.buckets[len(one.started) :]:
            one.started.append(self._start(bucket))
        self.retained = []
        for started in one.started:
            if started is not None:
                self._end(started)
        broadcast(list(self.module.buffers()), self.group)
        self._pass = None

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

    def _start(self, bucket: list[int]) -> _Started | None:
        params = [self._params[index] for index in bucket if self._is_mine(index)]
        if not params:
            return None
        grads = [param.grad for param in params]
        flags = params[0].new_ones(len(params))
        parts = []
        for place, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is None:
                flags[place].zero_()
            parts.append(torch.zeros_like(param) if grad is None else grad.to(param.dtype))
        flat = flatten([*parts, flags])
        if self.options.always_fp32 and flat.dtype in _NARROW:
            flat = flat.float()
        return _Started(params, grads, flat, self.start(flat, len(params)))

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

    def _end(self, started: _Started) -> None:
        """Write the reduced gradients of a bucket back."""
        params, flat = started.params, started.flat
        values = self.end(started.work, flat, len(params)).to(params[0].dtype)
        views = unflatten(values, params)
        if self.options.retain:
            self.retained.append(values)
        absent = any(grad is None for grad in started.grads)
        used = flat[-len(params) :].tolist() if absent else [1.0] * len(params)
        old, new = [], []
        for param, grad, view, count in zip(params, started.grads, views, used, strict=True):
            if not count:
                continue
            if self.options.retain:
                param.grad = view
            elif grad is None:
                param.grad = torch.empty_like(param).copy_(view)
            else:
                old.append(grad)
                new.append(view)
        if old:
            torch._foreach_copy_(old, new)
        if not self.options.average:
            for param in params:
                if param.grad is not None:
                    self._sums[id(param)] = weakref.ref(param.grad), param.grad._version

    def _check_sum(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Raise where a gradient was added to a sum over ranks, which would be summed again."""
        sum_, version = self._sums.pop(id(param), (lambda: None, 0))
        if sum_() is grad and grad._version == version + 1:
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

    def indices(self, params: Sequence[torch.nn.Parameter]) -> list[int | None]:
        """The index of each parameter, ``None`` for one of another module."""
        return [self._index.get(id(param)) for param in params]

    def _name(self, param: torch.Tensor) -> str:
        names = (name for name, one in self.module.named_parameters() if one is param)
        return f"parameter '{next(names, '?')}'"


def _remove(hooks: dict[int, Any]) -> None:
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
