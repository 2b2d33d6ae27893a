"""The functions inside of the original's layers, for programs that call them by their modules.

Each computes what the layer of its name computes, from weights that are passed; see
:mod:`apex.contrib.multihead_attn._base`. Where the original had a function for each of its kernels,
these differ in their arguments alone.

``mask`` and ``pad_mask`` are ``(target, source)`` with ``use_time_mask``, else ``(batch, source)``;
``mask_additive`` ones hold numbers to add.
"""

from types import SimpleNamespace
from typing import Any

import torch

from apex.contrib.multihead_attn._base import _attend
from apex.ops._check import ArgumentError

_NAMES = (
    "self_attn_func", "fast_self_attn_func", "fast_self_attn_norm_add_func", "encdec_attn_func",
    "fast_encdec_attn_func", "fast_encdec_attn_norm_add_func",
)  # fmt: skip
_KINDS: dict[str, Any] = {name: type(name, (SimpleNamespace,), {}) for name in _NAMES}  # for errors
Tensor = torch.Tensor


def attend(
    name: str,
    query: Tensor,
    key: Tensor,
    options: tuple[bool, bool, int, float],
    output: tuple[Tensor, Tensor | None],
    mask: Tensor | None,
    *,
    scale: float | None = None,
    additive: bool = False,
    norm: tuple[Tensor | None, Tensor | None] = (None, None),
    **projections: Tensor | None,
) -> Tensor:
    """Attend, as the layer whose weights these are.

    Args:
        name: Of the function, for errors.
        query: ``(target, batch, embed_dim)``.
        key: ``(source, batch, embed_dim)``.
        options: ``use_time_mask``, ``is_training``, ``heads`` and ``dropout_prob``.
        output: Weight and bias behind the attention.
        mask: The mask, if there is one.
        scale: Of the scores; by default that of the layers.
        additive: Whether the mask holds numbers to add.
        norm: Weight and bias of the layer norm, with which the query is added to the result.
        projections: The layer's parameters that make queries, keys and values.
    """
    use_time_mask, is_training, heads, dropout = options
    size, rest = divmod(query.shape[-1], max(1, heads))
    if rest or heads < 1 or not 0 <= dropout <= 1:
        raise ArgumentError(
            f"{name}: heads is {heads} for {query.shape[-1]} features, and dropout_prob {dropout}. "
            "Pass a number of heads that divides the features, and a dropout_prob from 0 to 1."
        )
    layer = _KINDS[name](
        embed_dim=query.shape[-1], num_heads=heads, head_dim=size, dropout=dropout, training=True,
        scaling=size**-0.5 if scale is None else scale, mask_additive=additive, lyr_nrm=None,
        include_norm_add=norm[0] is not None, lyr_nrm_gamma_weights=norm[0],
        lyr_nrm_beta_weights=norm[1], out_proj_weight=output[0], out_proj_bias=output[1],
        **projections,
    )  # fmt: skip
    padding, time = (None, mask) if use_time_mask else (mask, None)
    return _attend(layer, query, key, None, padding, time, is_training)
