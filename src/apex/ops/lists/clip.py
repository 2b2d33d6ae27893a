"""Clipping a list of gradients by their total norm, without waiting to know it.

    grad *= min(1, max_norm / (norm + 1e-6))

The factor is applied in any case. Norm and factor are float32, each gradient is rounded once.

Source: Pascanu et al., arXiv:1211.5063, algorithm 1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from apex.ops import _runtime
from apex.ops.lists.placements import is_sharded, norm_of_all, norm_of_ranks
from apex.ops.lists.scale import scale_
from apex.ops.lists.tensor_lists import Scalar, grouped, local_parts, scalar_on
from apex.ops.lists.tensor_norms import l2_norm, max_norms
from apex.ops.lists.unscale import multiply_

Partition = tuple[Any, torch.device]

_DTYPE, _IS_CPU, _LAYOUT = map(attrgetter, ("dtype", "is_cpu", "layout"))


@torch.no_grad()
def clip_(
    grads: Sequence[torch.Tensor],
    max_norm: float | torch.Tensor,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    over: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Clip in place.

    Args:
        grads: Gradients; dtypes and devices may be mixed. DTensors are placed as their parameters.
        max_norm: Largest total norm allowed.
        norm_type: Which p-norm. 2 and infinity are one launch for each dtype and device.
        error_if_nonfinite: Whether to raise, which waits.
        over: All parameters, see :func:`apex.ops.lists.placements.norm_of_all`.

    Returns:
        The norm before clipping over all ranks, 0-dim, on the first gradient's device.

    Raises:
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set.
        ValueError: ``norm_type`` is not above 0, and a gradient is sharded.
    """
    if not grads and not any(map(is_sharded, over)):
        return torch.zeros((), device="cpu", dtype=torch.float32)
    norm = total_norm(grads, norm_type, over)
    factor = coefficient(norm, max_norm, norm_type, error_if_nonfinite)
    if grads:
        multiply_by_(grads, factor)
    return norm


def coefficient(
    norm: torch.Tensor,
    max_norm: float | torch.Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """What gradients of that total norm are multiplied by: 0-dim, at most 1; as :func:`clip_`."""
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    max_norm = scalar_on(max_norm, norm.device)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0).reshape(())


@torch.no_grad()
def multiply_by_(grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients, as those of :func:`clip_`, by a 0-dim tensor in place."""
    grads = local_parts(grads)
    if not _runtime.forced() and all(map(_IS_CPU, grads)):
        multiply_(grads, factor.item())
        return
    if not _are_dense(grads):
        for grad in grads:
            grad.mul_(factor.to(grad.device, non_blocking=True))
        return
    for _, (some,), _ in grouped([grads]):
        here = factor.to(some[0].device, non_blocking=not some[0].is_cpu)
        scale_(some, some, here if some[0].dtype == torch.float64 else here.float())


def clipped(
    grads: Sequence[torch.Tensor],
    factor: Scalar,
    max_norm: float,
    over: Sequence[torch.Tensor] = (),
    partition: Partition | None = None,
) -> Scalar:
    """``factor``, times what makes the norm of ``factor * grads`` at most ``max_norm``.

    Args:
        grads: All gradients, of any dtypes, devices and placements.
        factor: What they are multiplied by.
        max_norm: The largest norm; 0 means that there is none.
        over: As in :func:`l2_norm_of_all`.
        partition: As there.
    """
    if not max_norm or not (grads or over or partition):
        return factor
    norm = l2_norm_of_all(grads, factor, over, partition)
    factor = scalar_on(factor, norm.device)
    if not _runtime.waits(norm.device) and not isinstance(factor, torch.Tensor):
        size = norm.item()
        return factor * (max_norm / size) if size > max_norm else factor
    return factor * torch.where(norm > max_norm, max_norm / norm, 1.0)


def l2_norm_of_all(
    grads: Sequence[torch.Tensor],
    factor: Scalar = 1.0,
    over: Sequence[torch.Tensor] = (),
    partition: Partition | None = None,
) -> torch.Tensor:
    """Compute the Euclidean norm of ``factor * grads``, over all ranks.

    Args:
        grads: Gradients, of any dtypes, devices and placements.
        factor: What they are multiplied by.
        over: All parameters, see :func:`apex.ops.lists.placements.norm_of_all`.
        partition: A process group whose ranks have other gradients, and the device where it
            communicates.
    """
    norm = norm_of_all(grads, functools.partial(l2_norm, factor=factor), 2.0, over)
    return norm if partition is None else norm_of_ranks(norm, *partition)


def total_norm(
    grads: Sequence[torch.Tensor], norm_type: float, over: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Compute the norm of all elements together: float32, or float64 where a gradient is that."""
    return norm_of_all(grads, functools.partial(_local_norm, norm_type=norm_type), norm_type, over)


def _local_norm(grads: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    usual = {*map(_DTYPE, grads)} <= {*_runtime.DTYPES} and _are_dense(grads)
    if usual and norm_type == 2.0:
        return l2_norm(grads)
    if usual and norm_type == float("inf"):
        return max_norms(grads).amax()
    full = [grad for grad in grads if grad.numel()]  # torch finds no largest among none
    if not full:
        wide = any(grad.dtype == torch.float64 for grad in grads)
        dtype = torch.float64 if wide else torch.float32
        return torch.zeros((), device=grads[0].device, dtype=dtype)
    norms = [_norm_of_one(grad, norm_type) for grad in full]
    norm: torch.Tensor = torch.nn.utils.get_total_norm(norms, norm_type)
    return norm


def _norm_of_one(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    norm: torch.Tensor
    if grad.dtype in _runtime.DTYPES and _are_dense([grad]):
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32)
    else:
        norm = torch.nn.utils.get_total_norm([grad], norm_type)
    return norm


def _are_dense(grads: Sequence[torch.Tensor]) -> bool:
    return {*map(_LAYOUT, grads)} == {torch.strided}
