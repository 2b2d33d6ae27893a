"""Gradients of the sharded optimizers: hooks, buckets, and rounds of reduce-scatters.

A hook takes a gradient as it arrives, copies it into a flat bucket and sets ``param.grad`` to
``None``. Full buckets are reduce-scattered while the backward pass goes on.

**Ranks call the same collectives in the same order.** Buckets are sent in a fixed order, that of
the parameters from last to first. A *round* sends each of them once. A step has as many rounds as
the parameter with most gradients got some outside of ``no_sync``, and at least one: so a rank
without a batch takes part, and parameters that only some ranks use are zeros on the others. What
the hooks did not send is sent by :meth:`ShardedGradients.grad_sync`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from apex._compat import private
from apex.ops import _runtime
from apex.ops.lists.collectives import new_gradient_group, ranks_agree
from apex.ops.lists.flat import broadcast, group_by_size
from apex.ops.lists.shards import Kinds, Piece, Sent, ShardBucket
from apex.ops.lists.streams import HookOrder
from apex.ops.lists.tensor_lists import Scalar
from apex.optimizers import _checks
from apex.optimizers._base import FusedOptimizer

ENOUGH = 0.7  # of a bucket that is filled; the original's


class Sharding(NamedTuple):
    """How gradients and parameters are sent, see the arguments of ``DistributedFusedAdam``."""

    dtype: torch.dtype = torch.float32
    grad_sync_dtype: torch.dtype | None = None
    param_sync_dtype: torch.dtype | None = None
    process_group: Any = None
    distributed_process_group: Any = None
    redundant_process_group: Any = None
    average_grad_sync: bool = True
    overlap_grad_sync: bool = True
    overlap_param_sync: bool = False
    bucket_cap_mb: float = 100.0
    pipeline_size: int = 2
    contiguous_param_buffer: bool = False
    contiguous_grad_buffer: bool = False
    store_params: bool = True
    store_param_remainders: bool = False
    with_scaled_states: bool = False


class Groups(NamedTuple):
    """Process groups: all ranks, those that share the state, and those with equal shards."""

    all: Any
    shards: Any
    copies: Any


class ShardedGradients(FusedOptimizer):
    """An optimizer whose gradients are reduced into shards."""

    def __init__(self, params: Any, defaults: dict[str, Any], options: Sharding) -> None:
        private.need("DistributedFusedOptimizer")
        self._options, self._groups = options, _groups(self._name, options)
        self._own: Groups | None = None
        self._buckets: list[ShardBucket] = []
        self._places: dict[int, tuple[ShardBucket, int]] = {}  # by the id of a parameter
        self._fragments: dict[int, tuple[ShardBucket, Piece]] = {}  # the same, of this rank
        self._capped: list[ShardBucket] = []  # those of bucket_cap_mb, until the first step
        self._hooks: dict[int, Any] = {}
        self._sent: deque[Sent] = deque()
        self._lock = threading.RLock()  # autograd has a thread for each device
        self._syncs = self._greedy = True
        self._is_made = False
        self._forget()
        super().__init__(params, defaults)
        self._is_made = True
        self._take_in(self._params())
        weakref.finalize(self, remove, self._hooks)

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError(
            f"{self._name} cannot be copied or pickled, because it has hooks and process groups. "
            "Save its state_dict()."
        )

    # -- parameters --------------------------------------------------------------------------------

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the same parameters on every rank. Rank 0 sends their values."""
        super().add_param_group(param_group)
        if self._is_made:
            self._take_in(self.param_groups[-1]["params"])

    def _check_params(self, params: Any) -> None:
        super()._check_params(params)
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in listed(params)]
        nccl = torch.distributed.get_backend(self._groups.all) == "nccl"
        first = [*self._params(), *tensors][:1]
        for param in filter(torch.is_tensor, tensors):
            problem = ""
            if hasattr(param, "placements"):
                problem = "is a DTensor, which is sharded already. Use FusedAdam for it"
            elif param.device != first[0].device:
                problem = (
                    f"is on {param.device}, and another parameter is on {first[0].device}. Move "
                    "one of them"
                )
            elif param.is_meta or (nccl and not param.is_cuda):
                problem = (
                    f"is on {param.device}. Move the model to a device of this rank before making "
                    "the optimizer"
                )
            if problem:
                raise RuntimeError(f"{self._name}: a parameter {problem}.")
            self._kinds_of(param)

    def _kinds_of(self, param: torch.Tensor, *dtypes: torch.dtype | None) -> Kinds:
        """The dtypes for a parameter, checked; ``dtypes`` instead of those of the options."""
        options, names = self._options, ("dtype", "grad_sync_dtype", "param_sync_dtype")
        pairs = zip(dtypes or (None, None, None), names, strict=True)
        state, grad, sent = (one or getattr(options, name) for one, name in pairs)
        raw = isinstance(sent, torch.dtype) and not (sent.is_floating_point or sent.is_complex)
        grad, sent = grad or state, param.dtype if raw else sent or param.dtype
        for name, one in zip(names, (state, grad, sent), strict=True):
            if one not in (*_runtime.DTYPES, torch.float64):
                raise RuntimeError(
                    f"{self._name}: {name} was {one}; allowed are torch.float32, float16, bfloat16 "
                    "and float64, and for param_sync_dtype also integer types, to send bytes."
                )
        problem, right = "", (torch.bfloat16, torch.float32, torch.bfloat16)
        if options.store_param_remainders and (param.dtype, state, sent) != right:
            problem = "store_param_remainders=True needs torch.bfloat16, and dtype=torch.float32"
        elif options.with_scaled_states and state != torch.float16:
            problem = f"with_scaled_states=True needs dtype=torch.float16; it was {state}"
        elif sent != param.dtype and options.contiguous_param_buffer:
            problem = f"contiguous_param_buffer=True excludes param_sync_dtype={sent}"
        if problem:
            raise RuntimeError(f"{self._name}: a parameter has {param.dtype}, and {problem}.")
        return Kinds(state, grad, sent, raw)

    def _warn_of_rounding(self, kinds: Iterable[tuple[torch.dtype, Kinds]]) -> None:
        """Warn where weights get coarser than the parameters' dtype."""
        texts = set()
        for dtype, (state, _, sent, _) in kinds:
            used = [("dtype", state)] * self._options.store_params + [("param_sync_dtype", sent)]
            texts |= {
                f"{self._name}: {name}={one} rounds parameters of {dtype}. Pass {name}={dtype} to "
                "keep all their digits."
                for name, one in used
                if torch.promote_types(one, dtype) != one
            }
        for text in sorted(texts):
            warnings.warn(text, stacklevel=2)

    def _take_in(self, params: list[torch.Tensor]) -> None:
        """Let parameters start with rank 0's values, and put hooks on those that are trained."""
        if not params:
            return
        sizes = [len(group["params"]) for group in self.param_groups]
        options = [pair for pair in self._options._asdict().items() if "group" not in pair[0]]
        shapes = [(*p.shape, str(p.dtype), p.requires_grad) for p in params]
        ranks_agree(
            [*shapes, ("groups of", *sizes), *options],
            self._groups.all,
            params[0].device,
            f"{self._name}: rank {{rank}} differs from rank 0 in shapes, dtypes or requires_grad "
            "of parameters, in groups or in options: it has {other}, and rank 0 has {first}. Build "
            "the same model and optimizer on every rank.",
        )
        self._warn_of_rounding({(param.dtype, self._kinds_of(param)) for param in params})
        broadcast(params, self._groups.all)
        if self._own is None:  # the same ranks, without other collectives
            device = params[0].device
            made = {one: one and new_gradient_group(one, device) for one in self._groups}
            self._own = Groups(*map(made.__getitem__, self._groups))
        self._hook(params)
        self._seem_to_have_state()

    def _seem_to_have_state(self) -> None:
        """Fill ``state`` with empty dicts; the state is in the shard.

        torch's ``get_state_dict`` steps an optimizer without any, to make some.
        """
        for param in self._params():
            self.state[param] = {}

    def _hook(self, params: Iterable[torch.Tensor]) -> None:
        this = weakref.ref(self)

        def hook(param: torch.Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._arrived(param)

        for param in params:
            if param.requires_grad and id(param) not in self._hooks:
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks[id(param)] = handle

    def _trained(self) -> list[torch.Tensor]:
        """Parameters that have buckets, or that are to get some; the last ones first."""
        return [p for p in reversed(self._params()) if p.requires_grad or id(p) in self._places]

    def _prepare_buckets(self) -> None:
        trained = self._trained()
        if len(trained) != len(self._places):
            self._make_buckets(trained, (None, None, None), self._options.bucket_cap_mb)

    def _make_buckets(
        self, params: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype | None], cap_mb: float
    ) -> None:
        """Put those of ``params`` that have no bucket into new ones."""
        if not {*map(id, params)} <= {*map(id, self._params())}:
            raise ValueError(f"{self._name}: a parameter is in none of the optimizer's groups.")
        new = [param for param in params if id(param) not in self._places]
        kinds = [self._kinds_of(param, *dtypes) for param in new]
        if any(dtypes):
            self._warn_of_rounding({(p.dtype, kind) for p, kind in zip(new, kinds, strict=True)})
        self._hook(new)
        options, own = self._options, self._own
        assert own is not None
        world = torch.distributed.get_world_size(own.shards)
        rank = torch.distributed.get_rank(own.shards)
        elements = min(cap_mb * 2**20 / kinds[0].grad.itemsize, 2**62) if new else 1
        for members in group_by_size(range(len(new)), new, max(int(elements), 1)):
            some = [new[index] for index in members]
            bucket = ShardBucket(some, kinds[members[0]], rank, world, stores=options.store_params)
            self._buckets.append(bucket)
            self._capped += [bucket] * math.isfinite(cap_mb)
            self._places |= {id(param): (bucket, place) for place, param in enumerate(some)}
            self._fragments |= {id(some[one.place]): (bucket, one) for one in bucket.pieces}
            if options.contiguous_grad_buffer:
                bucket.keep_grads()
            if options.contiguous_param_buffer:
                bucket.make_buffer()

    def _warn_of_empty_buckets(self) -> None:
        """Warn once of buckets that are much smaller than the program says.

        Not of the default: few models are too small for it on purpose.
        """
        buckets, self._capped = self._capped, []
        cap_mb = self._options.bucket_cap_mb
        if not buckets or cap_mb == Sharding._field_defaults["bucket_cap_mb"]:
            return
        sizes = [b.kinds.grad.itemsize * p.numel() for b in buckets for p in b.params]
        filled = sum(sizes) / (len(buckets) * cap_mb * 2**20)
        if filled < ENOUGH:
            warnings.warn(
                f"{self._name}: buckets are {filled:.0%} full on average, with "
                f"bucket_cap_mb={cap_mb}. Only full buckets are sent during the backward pass, so "
                "little communication overlaps with it. Consider decreasing the bucket_cap_mb "
                "argument.",
                stacklevel=2,
            )

    # -- gradients ---------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Begin a new step."""
        with private.DisableTorchFunctionSubclass():  # of parameters that are on their way
            for bucket in self._buckets:
                bucket.forget()
        self._present: set[int] = set()  # ids of parameters that got gradients on this rank
        self._factor: Scalar = 1.0  # what reduced gradients are to be multiplied by
        self._is_unscaled = self._is_final = False  # final: unscaled or clipped
        self._measured: torch.Tensor | None = None
        self._round = self._next = 0  # what is sent next
        self._order = HookOrder()

    @torch.no_grad()
    def _arrived(self, param: torch.Tensor) -> None:
        with self._lock:
            if id(param) not in self._places:
                self._prepare_buckets()
            bucket, place = self._places[id(param)]
            if self._is_final:
                raise RuntimeError(
                    f"{self._name}: a gradient arrived after the gradients were unscaled or "
                    "clipped. Call step() or this optimizer's zero_grad() before the next backward "
                    "pass; the model's zero_grad() does not reach reduced gradients."
                )
            if param.grad is None and place not in bucket.viewed:
                raise RuntimeError(
                    f"{self._name}: another hook removed the gradient of a parameter of shape "
                    f"{tuple(param.shape)}. If there is another sharded optimizer of the same "
                    "parameters, delete it first."
                )
            if not self._syncs and not self._greedy:
                return
            self._order.follow(param.device)
            self._take(bucket, place)
            if not self._syncs:
                return
            bucket.arrived(place)
            following = self._buckets[self._next]
            while self._options.overlap_grad_sync and following.filled and not following.missing:
                self._send()
                following = self._buckets[self._next]

    def _take(self, bucket: ShardBucket, place: int) -> None:
        param = bucket.params[place]
        if param.grad is not None:
            _checks.gradients(self._name, [param.grad])
        bucket.add(place)
        self._present.add(id(param))
        self._measured = None

    def _send(self) -> None:
        """Send the next bucket."""
        if not self._next:  # a round has the same buckets on all ranks
            self._prepare_buckets()
        assert self._own is not None
        world = torch.distributed.get_world_size(self._groups.all)
        scale = 1.0 / world if self._options.average_grad_sync else 1.0
        self._sent.append(self._buckets[self._next].send(self._own.shards, scale))
        self._next += 1
        if self._next == len(self._buckets):
            self._round, self._next = self._round + 1, 0
        while self._own.copies is None and self._sent and _is_there(self._sent[0]):
            self._receive()  # frees its memory

    def _receive(self) -> None:
        assert self._own is not None
        sent = self._sent.popleft()
        sent.bucket.receive(sent, self._name, self._own.copies)

    @torch.no_grad()
    def grad_sync(self) -> None:
        """Reduce all remaining gradients, as ``step`` also does. All ranks must call it.

        Raises:
            RuntimeError: A collective failed, for example because another rank ended.
        """
        with self._lock:
            self._prepare_buckets()
            for bucket in self._buckets:
                for place, param in enumerate(bucket.params):
                    if param.grad is not None:
                        self._take(bucket, place)
                        bucket.arrived(place)
                self._present.update(id(bucket.params[place]) for place in bucket.viewed)
            wanted = max([1, *(count for b in self._buckets for count in b.arrivals)])
            while self._buckets and self._round < wanted:
                self._send()
            # copied after the last round, or made after it
            if any(bucket.filled or not bucket.rounds for bucket in self._buckets):
                while self._round <= wanted:
                    self._send()
            while self._sent:
                self._receive()

    @contextlib.contextmanager
    def no_sync(self, greedy_grad_copy: bool = False) -> Iterator[None]:
        """Accumulate gradients on this rank. The first backward pass after the block reduces them.

        With ``greedy_grad_copy`` they are copied into buckets instead of staying in ``param.grad``.
        """
        before = self._syncs, self._greedy
        self._syncs, self._greedy = False, bool(greedy_grad_copy)
        try:
            yield
        finally:
            self._syncs, self._greedy = before


def _is_there(sent: Sent) -> bool:
    return sent.work is None or bool(sent.work.is_completed())


def listed(params: Any) -> list[Any]:
    """One parameter or several as a list."""
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _groups(user: str, options: Sharding) -> Groups:
    """The process groups, checked."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            f"{user} needs a process group. Call torch.distributed.init_process_group() before."
        )
    every = options.process_group or distributed.group.WORLD
    shards, copies = options.distributed_process_group or every, options.redundant_process_group
    named = {"process_group": every, "distributed_process_group": shards}
    named |= {} if copies is None else {"redundant_process_group": copies}
    for name, group in named.items():
        if distributed.get_rank(group) < 0:
            raise ValueError(
                f"{user}: rank {distributed.get_rank()} is not in {name}. Pass a group that "
                "contains it."
            )
    sizes = {name: distributed.get_world_size(group) for name, group in named.items()}
    whole, *parts = sizes.values()
    if whole != math.prod(parts):
        raise RuntimeError(
            f"{user}: the sizes of the process groups are {sizes}; the first must be the product "
            "of the others. Pass a redundant_process_group of the ranks that keep equal shards."
        )
    return Groups(every, shards, copies)


def remove(hooks: dict[int, Any]) -> None:
    """Remove all hooks."""
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
