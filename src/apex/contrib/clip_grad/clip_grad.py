"""``clip_grad_norm_``: torch's, in two launches for each dtype and device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from apex.ops.lists.clip import clip_
from apex.ops.lists.placements import placed
from apex.ops.lists.tensor_lists import refuse_nested


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | torch.Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients down to a total norm of ``max_norm``, in place.

    Drop-in for ``torch.nn.utils.clip_grad_norm_``. Gradients may have any dtypes and devices, and
    sums are computed in float32. Every gradient is multiplied by
    ``min(1, max_norm / (norm + 1e-6))``, even by 1, so the host does not wait for the norm.

    Gradients that are DTensors are first redistributed to the placements of their parameters. A
    single all-reduce computes the norm over all ranks. Call the function on each rank, even on one
    without gradients.

    Args:
        parameters: Tensors whose ``grad`` is clipped. Tensors without gradients are skipped.
        max_norm: Largest total norm allowed.
        norm_type: Which p-norm; ``float("inf")`` for the largest element.
        error_if_nonfinite: Raise an error if the norm is inf or NaN, before any gradient changes.
            The host then waits for the norm.

    Returns:
        The total norm before clipping, a 0-dim tensor (never a DTensor) on the first gradient's
        device.

    Raises:
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set; or a parameter is a
            DTensor and its gradient is not, or the reverse.
        ValueError: ``norm_type`` is 0 or less, and a gradient is sharded.
        TypeError: A gradient is a nested tensor.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    having = [parameter for parameter in listed if parameter.grad is not None]
    refuse_nested("clip_grad_norm_: parameter", having)
    grads = placed("clip_grad_norm_", having, [parameter.grad for parameter in having])  # type: ignore[misc]
    return clip_(
        grads, max_norm, float(norm_type), error_if_nonfinite=error_if_nonfinite, over=listed
    )
