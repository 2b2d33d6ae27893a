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

    Drop-in for ``torch.nn.utils.clip_grad_norm_``. Gradients may have any dtypes and devices; sums
    run in float32. Every gradient is multiplied by ``min(1, max_norm / (norm + 1e-6))``, in any
    case, so nothing waits to know the norm.

    Gradients of DTensors are brought to the placements of their parameters first, and the norm is
    that over all ranks, by one all-reduce: call it on each of them, also without gradients.

    Args:
        parameters: Tensors whose ``grad`` is clipped; those without one are passed over.
        max_norm: Largest total norm allowed.
        norm_type: Which p-norm; ``float("inf")`` for the largest element.
        error_if_nonfinite: Raise when the norm is inf or nan, before anything changes. This waits.

    Returns:
        The total norm before clipping, 0-dim, on the first gradient's device; no DTensor.

    Raises:
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set, or only one of a
            parameter and its gradient is a DTensor.
        ValueError: ``norm_type`` is not above 0, and a gradient is sharded.
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
