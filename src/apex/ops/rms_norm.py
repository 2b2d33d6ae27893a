"""RMS norm over the last dimensions.

    y = x / sqrt(mean(x ** 2) + eps) * weight

``reference`` is the definition and, in float64, the oracle of the tests. All paths compute in
float32 and round once.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. 4.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from apex.ops import norm_pieces
from apex.ops._check import check_norm
from apex.ops._dtypes import Optional, to_dtype, wide
from apex.ops._op import op
from apex.ops.layer_norm import LEAST


def reference(x: torch.Tensor, weight: Optional, shape: Sequence[int], eps: float) -> torch.Tensor:
    """Compute the definition in the dtype of ``x``."""
    dims = tuple(range(-len(shape), 0))
    y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return y if weight is None else y * weight


def _definition(
    x: torch.Tensor,
    weight: Optional,
    shape: Sequence[int],
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    if x.dtype != dtype or (weight is not None and weight.dtype != dtype):
        to = wide(x, weight)
        x, weight = x.to(to), to_dtype(weight, to)
    return F.rms_norm(x, list(shape), weight, eps).to(dtype)


_PIECES = {
    "allocate": norm_pieces.allocate_rms_norm,
    "forward": norm_pieces.rms_norm,
    "backward": functools.partial(norm_pieces.backward, centered=False),
}
_ARGUMENTS = "Tensor x, Tensor? weight, SymInt[] shape, float eps, ScalarType dtype"

OP = op(
    f"rms_norm({_ARGUMENTS}) -> (Tensor y, Tensor rstd)",
    _definition,
    grads=("x", "weight"),
    least=LEAST,
    pieces=SimpleNamespace(**_PIECES, pays=norm_pieces.pays),
    autocast="half",
)
MEMORY_EFFICIENT = op(
    f"rms_norm_from_output({_ARGUMENTS}, ScalarType x_dtype) -> (Tensor y, Tensor rstd)",
    _definition,
    grads=("x", "weight"),
    kernel="rms_norm",
    saves=("y", "weight", "rstd"),
    pieces=SimpleNamespace(**_PIECES),
    autocast="half",
)


def rms_norm(
    x: torch.Tensor,
    weight: Optional,
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
        memory_efficient: As for :func:`apex.ops.layer_norm.layer_norm`.
        dtype: Of the output; by default that of ``x``. Under ``torch.autocast`` tensors are cast to
            its dtype first.

    Returns:
        ``(..., *shape)``.

    Raises:
        ArgumentError: What is passed does not fit together.
    """
    x, weight = OP.cast(x, weight)
    check_norm("rms_norm", x, weight, None, shape)
    if memory_efficient:
        return MEMORY_EFFICIENT(x, weight, shape, eps, dtype or x.dtype, x.dtype)
    return OP(x, weight, shape, eps, dtype or x.dtype)
