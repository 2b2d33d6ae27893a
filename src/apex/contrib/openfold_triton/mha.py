"""Attention with a mask and a bias, as a function, and a switch that programs read.

    softmax(q k^T / sqrt(size) + (mask - 1) * inf + bias) v

It is ``torch.nn.functional.scaled_dot_product_attention``, which chooses among the fused kernels of
a device. What is added to the scores is one tensor there, in the dtype of the queries: rows that
the mask hides as a whole attend as the rest of the scores says, as far as that dtype keeps it.
"""

import math
from collections.abc import Sequence

import torch

from apex.ops._check import ArgumentError, check_tensors
from apex.ops._dtypes import wide
from apex.ops._function import Applied
from apex.ops.layers.attention import attention

_enabled = False  # programs read it by is_enabled(); nothing here does


def enable() -> None:
    """Have :func:`is_enabled` return True."""
    global _enabled  # noqa: PLW0603  # the original's switch
    _enabled = True


def disable() -> None:
    """Have :func:`is_enabled` return False."""
    global _enabled  # noqa: PLW0603  # the original's switch
    _enabled = False


def is_enabled() -> bool:
    """Whether a program has asked for attention of this module; False at first."""
    return _enabled


def CanSchTriMHA(
    in_shape: Sequence[int], has_bias: bool = True, inf: float = 1e9, training: bool = True
) -> bool:
    """Return whether :func:`AttnTri` supports queries of shape ``in_shape``.

    They need five dimensions, and the first one must be 1. The original supported only a few shapes
    of one model, with a bias and one value of ``inf``.
    """
    return len(in_shape) == 5 and in_shape[0] == 1 and math.isfinite(inf)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    inf: float = 1e9,
    is_training: bool = True,
) -> torch.Tensor:
    _check(q, {"q": q, "k": k, "v": v, "mask": mask, "bias": bias})
    lead = q.dim() == 5
    if lead:
        q, k, v = q[0], k[0], v[0]
        mask = mask[0] if mask is not None and mask.dim() == 5 else mask
        bias = bias[0] if bias is not None and bias.dim() == 5 else bias
    y = attention(q, k, v, _added(q, mask, bias, inf))
    return y[None] if lead else y


def _added(
    q: torch.Tensor, mask: torch.Tensor | None, bias: torch.Tensor | None, inf: float
) -> torch.Tensor | None:
    """What is added to the scores, in the dtype of the queries."""
    if mask is None:
        return bias if bias is None else bias.to(q.dtype)
    found = (mask.to(wide(q)) - 1) * inf
    if bias is not None:
        found = found + bias
    return found.clamp(min=torch.finfo(q.dtype).min).to(q.dtype)  # float16 has no -1e9


def _check(q: torch.Tensor, tensors: dict[str, torch.Tensor | None]) -> None:
    check_tensors("AttnTri", tensors, floating=("q", "k", "v", "bias"), required=("k", "v"))
    for name, x in tensors.items():
        if x is None:
            continue
        is_input = name in ("q", "k", "v")
        fits = x.dim() == q.dim() in (4, 5) if is_input else x.dim() <= q.dim()
        if not fits or (x.dim() == 5 and x.shape[0] != 1) or (is_input and x.dtype != q.dtype):
            raise ArgumentError(
                f"AttnTri: {name} is {x.dtype} of shape {[*x.shape]}, and q {q.dtype} of "
                f"{[*q.shape]}. Pass q, k and v of one dtype, (batch, heads, length, size) or "
                "(1, batch, heads, length, size), and a mask and a bias that can be expanded to "
                "the scores."
            )


class FusedAttenionCoreFunc(Applied):
    """What :func:`AttnTri` applies; the original spells it so."""

    function = staticmethod(_attend)


AttnTri = FusedAttenionCoreFunc.apply


def AttnBiasJIT(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor,
    inf: float,
) -> torch.Tensor:
    """Compute attention with a mask and a bias, as :func:`AttnTri` does, for any sizes."""
    return _attend(query, key, value, mask, bias, inf)


def AttnNoBiasJIT(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, inf: float
) -> torch.Tensor:
    """Compute attention with a mask and no bias, as :func:`AttnTri` does, for any sizes."""
    return _attend(query, key, value, mask, None, inf)
