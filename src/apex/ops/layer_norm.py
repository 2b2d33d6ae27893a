"""Layer norm over the last dimensions.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias,    var biased

``reference`` is the definition and, in float64, the oracle of the tests; how and where the rest is
computed is told in :mod:`apex.ops._rows`. All of it computes in float32 and rounds once.

Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, eq. 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex.ops import _rows


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: Sequence[int],
    eps: float,
) -> torch.Tensor:
    """Compute the definition in the dtype of ``x``."""
    dims = tuple(range(-len(shape), 0))
    centered = x - x.mean(dims, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: Sequence[int],
    eps: float,
    *,
    memory_efficient: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Shift and scale each row to mean 0 and variance 1, then by ``weight`` and ``bias``.

    Args:
        x: ``(..., *shape)``, any floating dtype.
        weight: ``shape``, or ``None``.
        bias: ``shape``, or ``None``.
        shape: The last dimensions of ``x``, which make a row.
        eps: Added to the variance.
        memory_efficient: Keep the output for the backward rather than the input, which can then be
            freed. Gradients are those of an input made again from the rounded output.
        dtype: Of the output; by default that of ``x``.

    Returns:
        ``(..., *shape)``.

    Raises:
        RuntimeError: What is passed does not fit together; see :func:`apex.ops._rows.check`.
    """
    if dtype is None or dtype == x.dtype:
        y = _rows.at_once(x, weight, bias, shape, eps, memory_efficient, True)
        if y is not None:
            return y
    return _rows.normalize(
        x, weight, bias, shape, eps, dtype or x.dtype, centered=True,
        memory_efficient=memory_efficient,
    )  # fmt: skip
