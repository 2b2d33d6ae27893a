"""QK-Clip, which keeps attention logits from growing: what makes MuonClip of Muon.

Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, section 2.1. Not here: heads that
share a part of their keys (multi-head latent attention), and DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PIECE = 2**24  # logits in memory at once
Rows = torch.Tensor | Sequence[torch.Tensor]


@torch.no_grad()
def max_attention_logits(
    query: torch.Tensor, key: torch.Tensor, *, scale: float | None = None, is_causal: bool = False
) -> torch.Tensor:
    """Compute the largest logit of each attention head, without storing all logits.

    The matrix product runs in the dtype of ``query``. Every position counts, padding too.

    Args:
        query: ``(..., heads, queries, dim)``, after rotary embeddings and norms.
        key: ``(..., key_heads, keys, dim)``; ``key_heads`` must divide ``heads``.
        scale: Scale of the logits; by default ``dim ** -0.5``.
        is_causal: Whether query ``i`` attends only to keys up to ``i``.

    Returns:
        ``(heads,)`` in float32, or float64 for float64 tensors.

    Raises:
        ValueError: ``key_heads`` does not divide ``heads``, or a tensor has fewer than three
            dimensions.
    """
    if query.dim() < 3 or key.dim() < 3:
        raise ValueError(
            f"max_attention_logits: query has {query.dim()} dimensions and key {key.dim()}; pass "
            "(..., heads, positions, dim)."
        )
    heads, groups = query.shape[-3], key.shape[-3]
    _check_heads("max_attention_logits", heads, groups)
    keys = key.repeat_interleave(heads // groups, -3).mT
    keys = keys * (query.shape[-1] ** -0.5 if scale is None else scale)
    rows = max(1, PIECE // max(1, keys.shape[-1] * query.shape[:-2].numel()))
    found = []
    for number, part in enumerate(torch.split(query, rows, -2)):
        logits = part @ keys
        if is_causal:
            seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
            logits.masked_fill_(seen.tril(number * rows).logical_not_(), -torch.inf)
        found.append(logits.movedim(-3, 0).flatten(1).amax(1))
    largest = torch.stack(found).amax(0)
    return largest if largest.dtype == torch.float64 else largest.float()


@torch.no_grad()
def qk_clip_(
    query: Rows,
    key: Rows,
    max_logits: torch.Tensor,
    *,
    threshold: float = 100.0,
    key_heads: int | None = None,
) -> torch.Tensor:
    """Scale the query and key weights of heads whose largest logit exceeds a threshold, in place.

    Call it after the optimizer's step. A head's logits are multiplied by
    ``factor = min(1, threshold / max_logits)``: its query and key rows are each multiplied by
    ``sqrt(factor)``. If heads share a key, the key uses the smallest factor of its group, and each
    query makes up for the difference. The host waits for the device, to learn whether any head is
    above the threshold. A largest logit of inf or NaN, as in a skipped step, changes nothing.

    A norm between the weights and the logits (QK norm) undoes the scaling, so the function then has
    no effect.

    Args:
        query: Weight ``(heads * dim, in)``, or a list of the weight and its bias
            ``(heads * dim,)``. For a fused layer pass rows of its weight, as from
            ``weight.detach().chunk(3)``.
        key: The same for the keys, ``(key_heads * dim, in)``.
        max_logits: ``(heads,)``: the largest logits over all data-parallel ranks, so that weights
            stay equal on all ranks.
        threshold: Largest logit allowed.
        key_heads: Number of heads of the keys; by default as many as the queries have.

    Returns:
        The factor of each head's logits, ``(heads,)``.

    Raises:
        TypeError: A weight is a DTensor.
        ValueError: The number of rows is not a multiple of the number of heads, ``key_heads`` does
            not divide ``heads``, or ``threshold`` is not above 0.

    Example:
        >>> query, key = torch.ones(2, 1), torch.ones(2, 1)
        >>> qk_clip_(query, key, torch.tensor([50.0, 400.0]), threshold=100.0)
        tensor([1.0000, 0.2500])
        >>> query.tolist()
        [[1.0], [0.5]]
    """
    heads, groups = len(max_logits), len(max_logits) if key_heads is None else key_heads
    _check_heads("qk_clip_", heads, groups)
    if not threshold > 0:
        raise ValueError(f"qk_clip_: threshold was {threshold}; pass a number above 0.")
    parts = [(one, heads) for one in _listed(query)] + [(one, groups) for one in _listed(key)]
    for one, count in parts:
        if hasattr(one, "placements"):
            raise TypeError(
                "qk_clip_: a weight is a DTensor; pass a plain tensor with the rows of whole heads."
            )
        if len(one) % count:
            raise ValueError(
                f"qk_clip_: the rows of a weight of shape {tuple(one.shape)} are not divisible by "
                f"{count} heads. Pass a weight with the same number of rows for each head."
            )
    if max_logits.dtype != torch.float64:
        max_logits = max_logits.float()
    large = max_logits.isfinite() & (max_logits > threshold)
    factor = torch.where(large, threshold / max_logits, 1.0)
    if large.any():
        of_keys = factor.view(groups, -1).amin(1).sqrt()
        of_queries = factor / of_keys.repeat_interleave(heads // groups)
        for rows, scales in ((query, of_queries), (key, of_keys)):
            for one in _listed(rows):
                blocks = one.detach().view(len(scales), -1, *one.shape[1:])
                blocks.mul_(scales.view(-1, *[1] * one.dim()))
    return factor


def _listed(rows: Rows) -> list[torch.Tensor]:
    return [rows] if isinstance(rows, torch.Tensor) else list(rows)


def _check_heads(name: str, heads: int, groups: int) -> None:
    if groups < 1 or heads % groups:
        raise ValueError(f"{name}: {groups} key heads do not divide {heads} heads.")
