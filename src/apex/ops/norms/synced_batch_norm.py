"""Batch norm over the batches of all processes of a group: what they exchange, and autograd.

Each process sends the mean, the variance and the number of its elements (one ``all_gather`` in the
forward) and two sums of its gradients (one ``all_reduce`` in the backward). Formulas and numbers:
:mod:`apex.ops.norms.batch_norm`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from apex._compat import private
from apex.ops._check import ArgumentError
from apex.ops._dtypes import Optional
from apex.ops.norms.batch_norm import gradient_sums, input_gradient, merge, moments, normalize

if TYPE_CHECKING:  # a torch without torch.distributed imports this file too
    from torch.distributed import ProcessGroup

Tensor = torch.Tensor

# Subgroups of a default process group, by size: layers share them, as each has a communicator.
_SUBGROUPS: weakref.WeakKeyDictionary[Any, dict[int, ProcessGroup]] = weakref.WeakKeyDictionary()


def group_of(name: str, size: int) -> ProcessGroup | None:
    """The group of ``size`` neighbouring ranks that this process is in; None for a size of 1.

    All processes must call it equally often and in the same order, because groups are made here.

    Raises:
        ArgumentError: There are not so many processes, or ``size`` does not divide their number.
    """
    distributed = torch.distributed
    on = distributed.is_available() and distributed.is_initialized()
    world = distributed.get_world_size() if on else 1
    if not isinstance(size, int) or size < 1 or world % size:
        raise ArgumentError(
            f"{name} is {size} and there are {world} processes. Pass a divisor of the number of "
            "processes, after torch.distributed.init_process_group()."
        )
    if size in (1, world):
        return distributed.group.WORLD if size > 1 else None
    made = _SUBGROUPS.setdefault(distributed.group.WORLD, {})
    if size not in made:
        made[size] = distributed.new_subgroups(size)[0]  # type: ignore[no-untyped-call]
    return made[size]


def synced(
    name: str, x: Tensor, weight: Optional, bias: Optional, eps: float,
    group: ProcessGroup | None, record: Callable[[Tensor, Tensor, Tensor], None],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalize by the statistics of all processes of ``group``; of this one without a group.

    Args:
        name: Of the layer, for errors.
        x: ``(N, C, *)``.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        eps: Added to the variance.
        group: Of the processes, which must all make this call.
        record: Is called with mean and biased variance ``(C,)``, and the number of elements of a
            channel ``(1,)``; before the normalization, where a checkpoint's recomputation ends.

    Returns:
        The result; mean and ``1 / sqrt(variance + eps)``.

    Raises:
        ValueError: There is one element for each channel in all processes together.
    """
    recorded = torch.is_grad_enabled()
    wanted = recorded and any(t is not None and t.requires_grad for t in (x, weight, bias))
    mean, variance, total, wanted_anywhere = _gather(x, wanted, group)
    # Only where there is at most one element here, because to read a total waits for a GPU.
    if _count(x) <= 1 and total.item() == 1:
        raise ValueError(
            f"{name}: Expected more than 1 value per channel when training, got input size "
            f"{list(x.shape)}, and all processes together have 1 value. Pass more values."
        )
    record(mean, variance, total)
    if recorded and not wanted and wanted_anywhere.any():
        x = x.detach().requires_grad_()  # so that the backward of this process runs as well
    rstd = (variance + eps).rsqrt()
    y: Tensor = _Normalize.apply(group, x, weight, bias, mean, rstd, total)  # type: ignore[no-untyped-call]
    return y, mean, rstd


@torch.no_grad()
def update_running(
    running_mean: Tensor, running_var: Tensor, factor: float | Tensor, mean: Tensor,
    variance: Tensor, total: Tensor,
) -> None:  # fmt: skip
    """Move running statistics by ``factor`` to new ones, unless there was no element at all."""
    factor = (total > 0).to(mean.dtype) * factor
    unbiased = variance * (total / (total - 1).clamp(min=1))
    for buffer, new in ((running_mean, mean), (running_var, unbiased)):
        buffer.copy_(buffer.to(mean.dtype).lerp(new, factor))


@torch.no_grad()
def track(layer: private.BatchNorm, mean: Tensor, variance: Tensor, total: Tensor) -> None:
    """Count the batch, and update the running statistics of the layer, if it keeps them."""
    if not layer.track_running_stats or layer.running_mean is None:
        return
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    momentum = layer.momentum
    factor = 1 / layer.num_batches_tracked.to(mean) if momentum is None else momentum
    update_running(layer.running_mean, layer.running_var, factor, mean, variance, total)


def _count(x: Tensor) -> int:
    """How many elements a channel has."""
    return x.shape[0] * x.shape[2:].numel()


@torch.no_grad()
def _gather(
    x: Tensor, wanted: bool, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics of all processes: mean, biased variance, count; and who wants a gradient."""
    mean, variance = moments(x)
    count, wants = (mean.new_full((1,), number) for number in (_count(x), wanted))
    if group is None:
        return mean, variance, count, wants
    message = torch.cat([mean, variance, count, wants])
    gathered = message.new_empty(torch.distributed.get_world_size(group), message.numel())
    torch.distributed.all_gather(list(gathered.unbind()), message, group=group)
    channels = mean.numel()
    ends = (channels, 2 * channels, 2 * channels + 1)
    means, variances, counts, wanted_by = gathered.tensor_split(ends, 1)
    return *merge(means, variances, counts), wanted_by


class _Normalize(torch.autograd.Function):
    """Normalization with given statistics, of which the backward knows that they depend on x.

    Every process makes the one ``all_reduce`` of the backward: another's input may need a gradient.
    """

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | None, *tensors: Any) -> Tensor:
        x, weight, bias, mean, rstd, _ = tensors
        ctx.save_for_backward(*tensors)
        ctx.group = group
        return normalize(x, mean, rstd, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd, total = ctx.saved_tensors
        dbias, products = gradient_sums(dy, x, mean, rstd)
        sums = torch.stack([dbias, products])
        if ctx.group is not None:
            torch.distributed.all_reduce(sums, group=ctx.group)
        _, *needs = ctx.needs_input_grad
        dx = (
            input_gradient(dy, x, mean, rstd, weight, sums[0], sums[1], total) if needs[0] else None
        )
        dweight = (products * rstd).to(weight.dtype) if needs[1] else None
        return None, dx, dweight, dbias.to(bias.dtype) if needs[2] else None, None, None, None
