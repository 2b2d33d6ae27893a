"""``DistributedDataParallel``: gradients averaged over ranks during the backward pass.

:mod:`apex.parallel._reduction` reduces gradients. This module has the arguments, and keeps ranks
equal:

* Rank 0's parameters (masters, where ``amp.initialize`` has made some) and buffers are sent to all
  ranks at construction, and before the first training forward, so that what rank 0 alone has loaded
  in between arrives; again when parameters were added or replaced.
* Rank 0's buffers are sent at the end of each pass that reduces. After the first training forward
  no forward communicates, and one without gradients never does: an evaluation on one rank cannot
  hang.

Left out: sparse gradients and DTensors; communication inside of one compiled graph.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from apex._compat import private
from apex.amp.casting.containers import applier
from apex.amp.gradients.forwards import broadcast_parameters, inside
from apex.ops.lists.collectives import gradient_group, ranks_agree
from apex.ops.lists.flat import broadcast
from apex.parallel._arguments import (
    EXCLUDE,
    check_tensors,
    indices,
    refuse,
    warn_of_idle,
)
from apex.parallel._bucket import Reducing
from apex.parallel._flat_calls import (
    Reducer,
    apply_flat_dist_call,
    check_process_group,
    extract_tensors,
    flat_dist_call,
    flatten,
    split_by_type,
    split_half_float_double,
    unflatten,
)
from apex.parallel._reduction import Reduction

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "extract_tensors",
    "flat_dist_call",
    "flatten",
    "split_by_type",
    "split_half_float_double",
    "unflatten",
]


class DistributedDataParallel(torch.nn.Module):
    """Average the gradients of ``module`` over all ranks during the backward pass.

    Each process computes its own part of the batch on its own device. Wrap the model before or
    after ``amp.initialize``, at any level, or without amp. In training call this object instead of
    ``module``.

    You need no option for unused parameters, for several forwards and backwards in a step, or for
    parameters that you freeze, unfreeze or cast between steps. All ranks must treat their
    parameters alike. If two wrappers share a module, the one that ran the last training forward
    reduces.

    Keys of the state dict have the prefix ``module.``. ``copy.deepcopy`` works, and so does
    pickling with the default process group.

    Args:
        module: The module to train, on its device.
        message_size: Smallest number of elements of a bucket.
        delay_allreduce: Reduce everything at the end of the backward pass.
        shared_param: Has no effect: parameters that are used twice need no option.
        allreduce_trigger_params: Parameters of ``module``, each of which ends a bucket.
            ``message_size`` then has no effect.
        retain_allreduce_buffers: Keep the reduced buckets in ``allreduce_buffers`` until the next
            pass. Gradients are views of them.
        allreduce_always_fp32: Reduce 16-bit gradients in float32.
        num_allreduce_streams: Has no effect: ``torch.distributed`` has its own streams.
        allreduce_communicators: ``(groups, streams)``. Only the first group is used.
        gradient_average: Divide by the number of ranks. With ``False`` gradients are sums divided
            by ``gradient_predivide_factor``.
        gradient_predivide_factor: Divide by this factor before the reduction. For an average,
            multiply by the factor afterwards. This prevents overflow of float16 sums.
        gradient_average_split_factor: Older name of ``gradient_predivide_factor``.
        prof: Has no effect: ``torch.profiler`` records collectives.
        process_group: The ranks to reduce over; ``None`` means the default group.
        broadcast_buffers: Keep buffers equal to rank 0's.

    Raises:
        RuntimeError: There is no process group, or names, shapes or options differ between ranks.
        ValueError: Arguments exclude each other, or parameters cannot be reduced.
        TypeError: ``module`` is not a module, ``message_size`` is not a number, or an argument is
            unknown.

    Example:
        >>> torch.distributed.init_process_group("nccl")  # doctest: +SKIP
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2")  # doctest: +SKIP
        >>> model = DistributedDataParallel(model)  # doctest: +SKIP
    """

    # What modules that an older Apex pickled whole may lack.
    process_group: Any = None
    _options = Reducing()

    def __init__(  # noqa: PLR0913  (the original's arguments)
        self,
        module: torch.nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Iterable[torch.nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: tuple[Sequence[Any], Sequence[Any]] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        *,
        process_group: Any = None,
        broadcast_buffers: bool = True,
        **others: Any,
    ) -> None:
        super().__init__()
        check_process_group("DistributedDataParallel")
        refuse(module, others, message_size)
        warn_of_idle(
            {
                "shared_param": shared_param,
                "num_allreduce_streams": num_allreduce_streams,
                "prof": prof,
            }
        )
        if allreduce_communicators is not None:
            if process_group is not None:
                raise ValueError(EXCLUDE.format("allreduce_communicators", "process_group"))
            try:
                process_group = allreduce_communicators[0][0]
            except (IndexError, TypeError):
                raise ValueError(
                    "DistributedDataParallel: allreduce_communicators is "
                    f"{allreduce_communicators}; it must be (groups, streams) with at least one "
                    "group. Or pass process_group."
                ) from None
        if gradient_average_split_factor is not None:
            if gradient_predivide_factor != 1.0:
                raise ValueError(
                    EXCLUDE.format("gradient_average_split_factor", "gradient_predivide_factor")
                )
            gradient_predivide_factor = gradient_average_split_factor
        if not 0 < gradient_predivide_factor < math.inf:
            raise ValueError(
                "DistributedDataParallel: gradient_predivide_factor is "
                f"{gradient_predivide_factor}; it must be above 0 and finite."
            )
        if allreduce_trigger_params is not None and delay_allreduce:
            raise ValueError(EXCLUDE.format("allreduce_trigger_params", "delay_allreduce"))
        self.module = module
        self.process_group = process_group or torch.distributed.group.WORLD
        check_tensors(module, self.process_group, buffers=broadcast_buffers)
        self._options = Reducing(
            message_size=message_size,
            triggers=indices(module, allreduce_trigger_params or (), "allreduce_trigger_params"),
            delay=bool(delay_allreduce),
            retain=bool(retain_allreduce_buffers),
            always_fp32=bool(allreduce_always_fp32),
            average=bool(gradient_average),
            predivide=float(gradient_predivide_factor),
            broadcast_buffers=bool(broadcast_buffers),
        )
        self._ranks_agree()
        self._reduction = self._new_reduction()
        self._broadcast()

    def _new_reduction(self) -> Reduction:
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        group = gradient_group(self.process_group, device)
        return Reduction(self.module, self.process_group, group, self._options)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module with ``inputs`` and ``kwargs``.

        Raises:
            RuntimeError: An earlier backward pass failed on this rank.
        """
        watches = torch.is_grad_enabled()
        if watches:
            self._before_forward()
        with inside(self):
            output = self.module(*inputs, **kwargs)
        if watches:
            self._watch(output)
        return output

    @private.disable_dynamo  # torch.compiler.disable would import Dynamo now
    def _before_forward(self) -> None:
        self._reduction.refresh()
        reduction = self._reduction
        if self.training and not reduction.starts_equal:
            self._ranks_agree()
            self._broadcast()
            reduction.starts_equal = True

    @private.disable_dynamo
    def _watch(self, output: Any) -> None:
        """Put hooks on ``output``: a backward pass begins where its gradient is computed."""
        reduction, reduces = self._reduction, self.require_backward_grad_sync

        def begin(grad: torch.Tensor) -> None:
            reduction.begin(reduces)

        def watch(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.register_hook(begin)  # type: ignore[no-untyped-call]
            return value

        applier(output, watch)

    # -- whether gradients are reduced ---------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether gradients are reduced; see :meth:`no_sync`. You can set it."""
        return self._reduction.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._reduction.enabled = bool(value)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank, without reducing them, inside the block.

        Run forward and backward passes inside. The first pass after the block reduces the whole
        sum.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def disable_allreduce(self) -> None:
        """Stop reducing gradients; see :meth:`no_sync`."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Reduce gradients again, including those accumulated since :meth:`disable_allreduce`."""
        self.require_backward_grad_sync = True

    # -- ranks start equal ---------------------------------------------------------------------

    def _broadcast(self) -> None:
        broadcast_parameters(list(self.module.parameters()), self.process_group)
        if self._options.broadcast_buffers:
            broadcast(list(self.module.buffers()), self.process_group)

    def _ranks_agree(self) -> None:
        """Raise on all ranks where names, shapes or dtypes are not the same on all."""
        named: list[tuple[str, torch.Tensor]] = [*self.module.named_parameters()]
        if self._options.broadcast_buffers:
            named += self.module.named_buffers()
        described: list[Any] = [(name, *t.shape, t.dtype, t.requires_grad) for name, t in named]
        described.append(self._options)
        device = named[0][1].device if named else torch.device("cpu")
        ranks_agree(
            described,
            self.process_group,
            device,
            "DistributedDataParallel: rank {rank} differs from rank 0 in names, shapes, dtypes or "
            "requires_grad of parameters and buffers, or in the arguments of "
            "DistributedDataParallel: it has {other}, and rank 0 has {first}. Build the same "
            "model, with the same arguments, on every rank.",
        )

    # -- copies --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not torch.distributed.group.WORLD:
            raise RuntimeError(
                "DistributedDataParallel: only a wrapper of the default process group can be "
                "pickled. Save its state_dict(), or pickle its module."
            )
        return {**vars(self), "process_group": None, "_reduction": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        check_process_group("DistributedDataParallel")
        self.process_group = self.process_group or torch.distributed.group.WORLD
        self._reduction = self._new_reduction()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        state = {**vars(self), "process_group": None, "_reduction": None}
        new.__setstate__({**copy.deepcopy(state, memo), "process_group": self.process_group})
        return new

    # -- names of the original's own parts -----------------------------------------------------

    @property
    def allreduce_buffers(self) -> list[torch.Tensor]:
        """The flat reduced buckets of the last pass, with ``retain_allreduce_buffers``."""
        return self._reduction.retained

    def create_hooks(self) -> None:
        """Put hooks on the parameters that require gradients now. Each forward does this too."""
        self._reduction.refresh()

    def comm_ready_buckets(self, param: torch.nn.Parameter) -> None:
        """Note that the gradient of the module's parameter ``param`` is complete."""
        self._reduction.ready(*indices(self.module, [param], "param"))

    def sync_bucket_structure(self) -> None:
        """Make buckets in the reverse order of the parameters. All ranks must call it."""
        self._reduction.learn([])

    def allreduce_bucket(
        self, bucket: Sequence[torch.Tensor], bucket_idx: int, force_default_stream: bool
    ) -> torch.Tensor:
        """Reduce the gradients in ``bucket``, which have one dtype, and return the flat result.

        ``bucket`` does not change. The other arguments have no effect.
        """
        dtype = self._options.dtype_of(bucket[0].dtype)
        summed = flatten([tensor.detach().to(dtype, copy=True) for tensor in bucket])
        all_reduce = self._reduction.all_reduce
        return all_reduce.end(all_reduce.begin(summed), summed).to(bucket[0].dtype)

    def allreduce_maybe_retain(
        self, bucket: Sequence[torch.Tensor], bucket_idx: int, force_default_stream: bool = False
    ) -> None:
        """Reduce ``bucket`` and write the result back; see :meth:`allreduce_bucket`."""
        reduced = self.allreduce_bucket(bucket, bucket_idx, force_default_stream)
        private.foreach_copy_([t.detach() for t in bucket], unflatten(reduced, bucket))

    def allreduce_fallback(self) -> None:
        """Reduce all gradients now, in one bucket for each dtype.

        All ranks must have gradients for the same parameters.
        """
        grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        for number, bucket in enumerate(split_half_float_double(grads)):
            self.allreduce_maybe_retain(bucket, number)
