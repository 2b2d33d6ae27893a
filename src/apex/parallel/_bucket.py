"""Buckets: gradients that are reduced together, and how they are; the state of a backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from apex._compat import private
from apex.ops._dtypes import NARROW
from apex.ops.lists.flat import unflatten
from apex.ops.lists.streams import HookOrder


@dataclass(frozen=True, slots=True)
class Reducing:
    """Arguments of the wrapper, see :class:`apex.parallel.DistributedDataParallel`.

    Attributes:
        triggers: Indices of parameters that end a bucket each, instead of ``message_size``.
    """

    message_size: int = 10000000
    triggers: tuple[int, ...] = ()
    delay: bool = False
    retain: bool = False
    always_fp32: bool = False
    average: bool = True
    predivide: float = 1.0
    broadcast_buffers: bool = True

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """What gradients of ``dtype`` are reduced in."""
        return torch.float32 if self.always_fp32 and dtype in NARROW else dtype


Options = Reducing  # its name in models that were pickled in 2026


class Bucket:
    """Parameters whose gradients are reduced together in one pass, and the flat copy that is sent.

    The copy ends with a number for each parameter: 1 where this rank has its gradient, else 0.

    Args:
        params: Of one dtype and device, at least one.
        dtype: Of the flat copy.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.params = list(params)
        self.size = sum(param.numel() for param in params)
        self.flat = params[0].new_empty(self.size + len(params), dtype=dtype)
        self.values, self.flags = self.flat[: self.size], self.flat[self.size :]
        self.views = unflatten(self.flat, params)
        self.work: Any = None
        self.grads: list[torch.Tensor | None] = []
        self.has_all = True

    def fill(self, without: set[int]) -> torch.nn.Parameter | None:
        """Copy the gradients into the flat copy, zeros for those that are missing.

        Args:
            without: ids of parameters that count as missing: their gradients are reduced already.

        Returns:
            ``None``; or a parameter whose gradient has another dtype or is not dense.
        """
        self.grads = [None if id(param) in without else param.grad for param in self.params]
        present, views = [], []
        self.flags.fill_(1.0)
        for place, (param, grad) in enumerate(zip(self.params, self.grads, strict=True)):
            if grad is None:
                self.views[place].zero_()
                self.flags[place].zero_()
            elif grad.dtype != param.dtype or grad.layout is not torch.strided:
                return param
            else:
                views.append(self.views[place])
                present.append(grad)
        self.has_all = len(present) == len(self.params)
        if present:
            private.foreach_copy_(views, present)
        return None

    def lost(self) -> list[torch.nn.Parameter]:
        """Parameters whose gradient was replaced or dropped since it was sent."""
        both = zip(self.params, self.grads, strict=True)
        return [param for param, grad in both if grad is not None and param.grad is not grad]

    def write_back(self) -> None:
        """Copy what was reduced into the gradients; a rank that had none gets one."""
        if self.has_all:
            private.foreach_copy_([grad for grad in self.grads if grad is not None], self.views)
        else:
            rows = zip(self.params, self.grads, self.views, self.flags.tolist(), strict=True)
            for param, grad, view, ranks in rows:
                if grad is not None:
                    grad.copy_(view)
                elif ranks and param.grad is None:
                    param.grad = torch.empty_like(param).copy_(view)


@dataclass(eq=False)
class BackwardPass:
    """One backward pass.

    Attributes:
        end: A weak reference to the callback at its end; dead if the pass has failed.
        reduces: Whether its gradients are reduced at all.
        arrived: Indices of parameters, in the order of their gradients; some may come twice.
        missing: The indices that each bucket waits for; empty where buckets wait for the end.
        started: The buckets on their way; ``None`` for one without trainable parameters.
        sums: ids of parameters whose gradients were sums over ranks when the pass began.
        order: Of its hooks, which may be on several streams.
    """

    end: weakref.ref[Any]
    reduces: bool = False
    arrived: list[int] = field(default_factory=list)
    missing: list[set[int]] = field(default_factory=list)
    started: list[Bucket | None] = field(default_factory=list)
    sums: set[int] = field(default_factory=set)
    order: HookOrder = field(default_factory=HookOrder)


class AllReduce:
    """Sums over the ranks of ``group``, divided as the options say."""

    def __init__(self, group: Any, options: Reducing) -> None:
        self.group = group
        self.before = 1.0 / options.predivide
        world = torch.distributed.get_world_size(group)
        self.after = options.predivide / world if options.average else 1.0

    def begin(self, flat: torch.Tensor, flags: int = 0) -> Any:
        """Begin to sum ``flat`` in place; its last ``flags`` numbers are not divided."""
        if self.before != 1.0:
            flat[: flat.numel() - flags].mul_(self.before)
        return torch.distributed.all_reduce(flat, group=self.group, async_op=True)

    def end(self, work: Any, flat: torch.Tensor, flags: int = 0) -> torch.Tensor:
        """Wait for what :meth:`begin` has returned; return ``flat`` without its ``flags``."""
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                "DistributedDataParallel: gradients could not be reduced over ranks. Has another "
                "rank ended, failed, or run fewer backward passes? Give every rank the same number "
                "of batches (DistributedSampler does), and look at the output of the other ranks. "
                f"{error}"
            ) from error
        if flat.is_cuda:  # made on the stream of the backward pass
            flat.record_stream(torch.cuda.current_stream(flat.device))
        values = flat[: flat.numel() - flags]
        return values.mul_(self.after) if self.after != 1.0 else values
