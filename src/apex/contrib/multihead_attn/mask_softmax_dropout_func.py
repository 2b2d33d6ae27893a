"""Dropout of a masked softmax, for programs that compute attention scores themselves."""

import torch
import torch.nn.functional as F

from apex.contrib.multihead_attn._masks import check_mask, join_masks
from apex.ops._check import ArgumentError, check_tensors
from apex.ops._dtypes import wide
from apex.ops.norms._scripted import left_to_python

_NAME = "fast_mask_softmax_dropout_func"


@left_to_python
def fast_mask_softmax_dropout_func(
    is_training: bool,
    heads: int,
    inputs: torch.Tensor,
    pad_mask: torch.Tensor | None,
    mask_additive: bool,
    dropout_prob: float,
) -> torch.Tensor:
    """Compute ``dropout(softmax(inputs + mask))`` over the last dimension.

    It is composed of torch's functions. In new code prefer ``scaled_dot_product_attention``, which
    does not write the scores to memory.

    Args:
        is_training: Whether to apply dropout.
        heads: Number of heads.
        inputs: Scores, ``(batch * heads, target, source)``.
        pad_mask: ``(batch, source)`` in bool or uint8, 1 where masked; or ``None``.
        mask_additive: Whether ``pad_mask`` holds floating numbers to add to the scores instead.
        dropout_prob: Share of the probabilities to drop.

    Returns:
        Tensor of the shape and dtype of ``inputs``, under ``torch.autocast`` too. It is computed in
        float32 (float64 for float64) and rounded once. Rows that are completely masked are 0.

    Raises:
        ArgumentError: An argument has an unsupported shape, dtype, device or value.

    Example:
        >>> scores, mask = torch.zeros(1, 1, 3), torch.tensor([[False, False, True]])
        >>> fast_mask_softmax_dropout_func(False, 1, scores, mask, False, 0.1)
        tensor([[[0.5000, 0.5000, 0.0000]]])
    """
    check_tensors(_NAME, {"inputs": inputs, "pad_mask": pad_mask}, floating=("inputs",))
    if inputs.dim() != 3 or heads < 1 or inputs.shape[0] % heads:
        raise ArgumentError(
            f"{_NAME}: inputs has shape {list(inputs.shape)} and there are {heads} heads; pass "
            "(batch * heads, target, source)."
        )
    if not 0.0 <= dropout_prob <= 1.0:
        raise ArgumentError(f"{_NAME}: dropout_prob is {dropout_prob}; pass a number from 0 to 1.")
    batch, source = inputs.shape[0] // heads, inputs.shape[2]
    sizes = f"inputs has {batch} sequences of {heads} heads and {source} keys"
    check_mask(_NAME, "pad_mask", pad_mask, mask_additive, (batch, source), sizes)
    scores = inputs.to(wide(inputs)).view(batch, heads, *inputs.shape[1:])
    mask, empty = join_masks(pad_mask, None, mask_additive, scores.dtype)
    if mask is not None:
        scores = scores + mask if mask_additive else scores.masked_fill(~mask, -torch.inf)
    y = F.dropout(torch.softmax(scores, -1), dropout_prob, is_training)
    if empty is not None:
        y = y.masked_fill(empty, 0.0)
    return y.view_as(inputs).to(inputs.dtype)
