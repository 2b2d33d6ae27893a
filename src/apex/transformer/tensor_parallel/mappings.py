"""Mappings of activations into and out of tensor- and sequence-parallel regions.

The forward of each mapping is a collective over the tensor-parallel group. The backward is its
adjoint:

==============================================  ===================  ==============================
mapping                                         forward              backward
==============================================  ===================  ==============================
``copy_to_tensor_model_parallel_region``        nothing              all-reduce
``reduce_from_tensor_model_parallel_region``    all-reduce           nothing
``scatter_to_tensor_model_parallel_region``     part of last dim     gather last dim
``gather_from_tensor_model_parallel_region``    gather last dim      part of last dim
``scatter_to_sequence_parallel_region``         part of first dim    gather first dim
``gather_from_sequence_parallel_region``        gather first dim     reduce-scatter, or part of it
``reduce_scatter_to_sequence_parallel_region``  reduce-scatter       gather first dim
==============================================  ===================  ==============================

Mappings never write to their inputs. You can differentiate a backward again. On one rank a mapping
returns its input. A dimension that is not divisible by the number of ranks raises
``ArgumentError``.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from apex import _compat
from apex.transformer import parallel_state
from apex.transformer.tensor_parallel.utils import split

dist = torch.distributed

_Map = Callable[[torch.Tensor], torch.Tensor]
_ranks = parallel_state.get_tensor_model_parallel_world_size
_group = parallel_state.get_tensor_model_parallel_group


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _reduce(x: torch.Tensor) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_group())
    return total


def _part(x: torch.Tensor, dim: int) -> torch.Tensor:
    part = split(x, _ranks(), dim)[parallel_state.get_tensor_model_parallel_rank()]
    return part.clone(memory_format=torch.contiguous_format)


def gather(x: torch.Tensor, asynchronous: bool = False) -> tuple[torch.Tensor, Any]:
    """Join the tensors of all ranks along the first dimension.

    Returns:
        The joined tensor; with ``asynchronous`` also an object. Call its ``wait()`` before you read
        the tensor.
    """
    whole = x.new_empty((x.shape[0] * _ranks(), *x.shape[1:]))
    function = getattr(dist, _compat.ALL_GATHER)
    return whole, function(whole, x.contiguous(), group=_group(), async_op=asynchronous)


def reduce_scatter(x: torch.Tensor, asynchronous: bool = False) -> tuple[torch.Tensor, Any]:
    """Add up the tensors of all ranks, and return this rank's part along the first dimension."""
    part = torch.empty_like(split(x, _ranks(), 0)[0], memory_format=torch.contiguous_format)
    function = getattr(dist, _compat.REDUCE_SCATTER)
    return part, function(part, x.contiguous(), group=_group(), async_op=asynchronous)


def _gather_along_first_dim(x: torch.Tensor) -> torch.Tensor:
    return gather(x)[0]


def _gather_along_last_dim(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(gather(x[None])[0].unbind(), -1)


def _reduce_scatter_along_first_dim(x: torch.Tensor) -> torch.Tensor:
    return reduce_scatter(x)[0]


_split_along_first_dim = functools.partial(_part, dim=0)
_split_along_last_dim = functools.partial(_part, dim=-1)


class _Mapping(torch.autograd.Function):
    """One map forward and another one backward, whose own backward is the first again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: _Map, back: _Map) -> torch.Tensor:
        ctx.maps = back, there
        return there(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return _Mapping.apply(dy, *ctx.maps), None, None  # type: ignore[no-untyped-call]


def _mapped(x: torch.Tensor, there: _Map, back: _Map) -> torch.Tensor:
    found: torch.Tensor = x if _ranks() == 1 else _Mapping.apply(x, there, back)  # type: ignore[no-untyped-call]
    return found


def copy_to_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Return the input, which is equal on all ranks. Its gradient is the sum over all ranks."""
    return _mapped(input_, _identity, _reduce)


def reduce_from_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Return the sum of the tensors of all ranks."""
    return _mapped(input_, _reduce, _identity)


def scatter_to_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the last dimension: map ``(..., n)`` to ``(..., n / ranks)``."""
    return _mapped(input_, _split_along_last_dim, _gather_along_last_dim)


def gather_from_tensor_model_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all ranks, joined along the last dimension."""
    return _mapped(input_, _gather_along_last_dim, _split_along_last_dim)


def scatter_to_sequence_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the sequence: map ``(s, ...)`` to ``(s / ranks, ...)``."""
    return _mapped(input_, _split_along_first_dim, _gather_along_first_dim)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor, to_model_parallel: bool = True
) -> torch.Tensor:
    """Return the whole sequence: map ``(s / ranks, ...)`` to ``(s, ...)``.

    If the operations after it are not tensor parallel, pass ``to_model_parallel=False``. Each rank
    then has the whole gradient, so the gradients of the ranks are not added up.
    """
    back = _reduce_scatter_along_first_dim if to_model_parallel else _split_along_first_dim
    return _mapped(input_, _gather_along_first_dim, back)


def reduce_scatter_to_sequence_parallel_region(input_: torch.Tensor) -> torch.Tensor:
    """Add up the tensors of all ranks, and return this rank's part of the sequence."""
    return _mapped(input_, _reduce_scatter_along_first_dim, _gather_along_first_dim)
