"""torch's attention with every dropout on every device."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute ``F.scaled_dot_product_attention``, also where everything is dropped.

    A dropout of 1 gives zeros, and cuDNN's attention refuses it (torch 2.11, H200).

    Args:
        q: Queries, ``(batch, heads, time, head_dim)``.
        k: Keys.
        v: Values.
        mask: As torch's ``attn_mask``.
        dropout: Probability, 0 to 1.
        scale: Of the scores; by default ``head_dim ** -0.5``.
    """
    if dropout == 1.0:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, scale=scale) * 0.0
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)
