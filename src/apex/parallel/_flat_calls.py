"""Collectives on flat copies of lists of tensors, under the names of NVIDIA's Apex; ``Reducer``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from apex._compat import private
from apex.amp.gradients.forwards import broadcast_parameters, is_initialized
from apex.amp.gradients.masters import grads_to_step
from apex.ops.lists import flat
from apex.ops.lists.flat import by_kind


def flatten(bucket: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy dense tensors one after the other into a 1-dimensional tensor; view one alone."""
    return flat.flatten(bucket)


def unflatten(coalesced: torch.Tensor, bucket: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """View a 1-dimensional tensor as tensors of the shapes of ``bucket``."""
    return flat.unflatten(coalesced, bucket)


@torch.no_grad()
def apply_flat_dist_call(
    bucket: Sequence[torch.Tensor],
    call: Callable[..., Any],
    extra_args: tuple[Any, ...] | None = None,
) -> None:
    """Run one collective on a flat copy of ``bucket``, and copy the result back.

    Args:
        bucket: Dense tensors of one dtype and device; overwritten.
        call: Takes the flat tensor and ``extra_args``, for example ``torch.distributed.broadcast``.
            After ``all_reduce`` alone the result is divided by the number of ranks.
        extra_args: More positional arguments of ``call``: ``(0,)`` is the source of a broadcast.
    """
    coalesced = flatten(bucket)
    call(coalesced, *(extra_args or ()))
    if call is torch.distributed.all_reduce:
        coalesced /= torch.distributed.get_world_size()
    private.foreach_copy_([tensor.data for tensor in bucket], unflatten(coalesced, bucket))


def flat_dist_call(
    tensors: Sequence[torch.Tensor],
    call: Callable[..., Any],
    extra_args: tuple[Any, ...] | None = None,
) -> None:
    """Run :func:`apply_flat_dist_call` once for each dtype and device of ``tensors``."""
    for bucket in by_kind(tensors):
        apply_flat_dist_call(bucket, call, extra_args)


def split_by_type(tensors: Iterable[torch.Tensor]) -> OrderedDict[str, list[torch.Tensor]]:
    """Group tensors by ``tensor.type()``, for example ``"torch.FloatTensor"``, in order."""
    groups: OrderedDict[str, list[torch.Tensor]] = OrderedDict()
    for tensor in tensors:
        groups.setdefault(tensor.type(), []).append(tensor)
    return groups


def split_half_float_double(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by dtype: float16, float32, float64, then others as they first appear.

    The original dropped the others, bfloat16 for example; and tensors on a CPU.
    """
    order = {torch.float16: 0, torch.float32: 1, torch.float64: 2}
    return sorted(by_kind(tensors), key=lambda group: order.get(group[0].dtype, 3))


def extract_tensors(maybe_tensor: Any, tensor_list: list[torch.Tensor]) -> None:
    """Append to ``tensor_list`` the tensors in nested iterables; other objects are passed over."""
    if isinstance(maybe_tensor, torch.Tensor):
        tensor_list.append(maybe_tensor)
    elif isinstance(maybe_tensor, Iterable) and not isinstance(maybe_tensor, (str, bytes)):
        for item in maybe_tensor:
            extract_tensors(item, tensor_list)


class Reducer:
    """Average gradients over all ranks when you call :meth:`reduce`, without hooks.

    Args:
        module_or_grads_list: A module, whose parameters (or amp's masters of them) are broadcast
            from rank 0 now. Or gradients in nested iterables. They must stay the same tensors, so
            use ``zero_grad(set_to_none=False)``.

    Raises:
        TypeError: The argument is not a module and contains no tensor.
        RuntimeError: There is no process group.

    Example:
        >>> reducer = Reducer(model)  # doctest: +SKIP
        >>> loss.backward()  # doctest: +SKIP
        >>> reducer.reduce()  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        check_process_group("Reducer")
        self.module: torch.nn.Module | None = None
        self.grads: list[torch.Tensor] = []
        if isinstance(module_or_grads_list, torch.nn.Module):
            self.module = module_or_grads_list
            broadcast_parameters(list(self.module.parameters()), None)
            return
        extract_tensors(module_or_grads_list, self.grads)
        if not self.grads:
            raise TypeError(
                f"Reducer got {module_or_grads_list!r:.80}, which is neither a module nor contains "
                "a tensor. Pass a torch.nn.Module or a list of gradients."
            )

    def reduce(self) -> None:
        """Overwrite the gradients by their mean over all ranks.

        All ranks must have gradients for the same parameters. After a block of ``amp.scale_loss``
        at O2 or O5 it reduces the float32 gradients of the masters, which the optimizer steps.
        """
        grads = self.grads
        if self.module is not None:
            grads = grads_to_step(self.module.parameters())
        flat_dist_call(grads, torch.distributed.all_reduce)


def check_process_group(name: str) -> None:
    """Raise ``RuntimeError`` unless the default process group, which ``name`` needs, was made."""
    if not is_initialized():
        raise RuntimeError(
            f"{name} needs a process group, but this process has none. Call "
            'torch.distributed.init_process_group("nccl") before (on a CPU: "gloo"), with the '
            "environment that torchrun sets, or with rank=, world_size= and init_method=."
        )
