"""RMS norm over the last dimensions.

    y = x / sqrt(mean(x ** 2) + eps) * weight

``reference`` is the definition and, in float64, the oracle of the tests; how and where the rest is
computed is told in :mod:`apex.ops._rows`. All of it computes in float32 and rounds once.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex.ops import _rows


def reference(
    x: torch.Tensor, weight: torch.Tensor | None, shape: Sequence[int], eps: float
) -> torch.Tensor:
    """Compute the definition in the dtype of ``x``."""
    dims = tuple(range(-len(shape), 0))
    y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return y if weight is None else y * weight


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    shape: Sequence[int],
    eps: float,
    *,
    memory_efficient: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Scale each row to a root mean square of 1, then by ``weight``.

    Args:
        x: ``(..., *shape)``, any floating dtype.
        weight: ``shape``, or ``None``.
        shape: The last dimensions of ``x``, which make a row.
        eps: Added to the mean square.
        memory_efficient: Keep the output for the backward rather than the input, which can then be
            freed. Gradients are those of an input made again from the rounded output.
        dtype: Of the output; by default that of ``x``.

    Returns:
        ``(..., *shape)``.

    Raises:
        RuntimeError: What is passed does not fit together; see :func:`apex.ops._rows.check`.
    """
    if dtype is None or dtype == x.dtype:
        y = _rows.at_once(x, weight, None, shape, eps, memory_efficient, False)
        if y is not None:
            return y
    return _rows.normalize(
        x, weight, None, shape, eps, dtype or x.dtype, centered=False,
        memory_efficient=memory_efficient,
    )  # fmt: skip
