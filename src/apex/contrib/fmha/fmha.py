"""``FMHA``: self-attention of packed sequences, each on its own, by PyTorch's functions.

Neighbours of one length are one call of ``scaled_dot_product_attention``. Without dropout, 16 bits
on a GPU are one call of ``torch.nn.attention.varlen``, where the release of torch has it. The host
reads ``cu_seqlens``, for which it waits.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from apex import _compat
from apex.ops._check import ArgumentError, check_tensors, check_unused
from apex.ops._function import Applied
from apex.ops._runtime import autocasts
from apex.ops.layers.attention import attention as attend

Tensor = torch.Tensor


def lengths_of(name: str, qkv: Tensor, ends: Tensor, p_dropout: float, max_s: int) -> list[int]:
    """Check the arguments and return the length of each sequence."""
    tensors = {"qkv": qkv, "cu_seqlens": ends}
    check_tensors(name, tensors, floating=["qkv"], integers=["cu_seqlens"], required=tensors)
    if qkv.dim() != 4 or qkv.shape[1] != 3 or ends.dim() != 1:
        raise ArgumentError(
            f"{name}: qkv has shape {list(qkv.shape)} and cu_seqlens {list(ends.shape)}. Pass "
            "(total, 3, heads, head_dim) and (sequences + 1,)."
        )
    if not 0 <= p_dropout <= 1:
        raise ArgumentError(f"{name}: p_dropout is {p_dropout}; pass a number from 0 to 1.")
    at: list[int] = ends.tolist()
    lengths = [end - start for start, end in itertools.pairwise(at)]
    if at[:1] != [0] or at[-1] > len(qkv) or min(lengths, default=0) < 0:
        raise ArgumentError(
            f"{name}: cu_seqlens is {at} for {len(qkv)} tokens. Pass the cumulative sums of the "
            "lengths, from 0 to at most the number of tokens."
        )
    if max(lengths, default=0) > max_s:
        raise ArgumentError(
            f"{name}: max_s is {max_s} and the longest sequence has {max(lengths)} tokens. Pass a "
            f"max_s of at least {max(lengths)}."
        )
    return lengths


def attention(
    qkv: Tensor, cu_seqlens: Tensor, p_dropout: float, max_s: int, is_training: bool,
    zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """Attend within each sequence.

    Args:
        qkv: ``(total, 3, heads, head_dim)``, in any floating dtype. Autocast casts it.
        cu_seqlens: Integers ``(sequences + 1,)``: the start of each sequence, and the end of the
            last one. A sequence may be empty.
        p_dropout: Share of the probabilities that is set to 0.
        max_s: Length of the longest sequence, or more.
        is_training: Whether to apply dropout.
        zero_tensors: Has no effect: the output is always 0 after the last sequence.

    Returns:
        ``(total, heads, head_dim)``.

    Raises:
        ArgumentError: An argument has an unsupported type, dtype, shape, device or value.
    """
    check_unused("FMHA", zero_tensors=zero_tensors)
    lengths = lengths_of("FMHA", qkv, cu_seqlens, p_dropout, max_s)
    dropout, total = p_dropout if is_training else 0.0, sum(lengths)
    if autocasts(qkv.device.type):
        qkv = qkv.to(torch.get_autocast_dtype(qkv.device.type))
    used, behind = qkv[:total], len(qkv) - total
    if total and not dropout and _compat.has_varlen_attention(qkv):
        y = _compat.varlen_attention(used, cu_seqlens, max(lengths))
        return F.pad(y, (0, 0, 0, 0, 0, behind))
    runs = [(n, len(list(run))) for n, run in itertools.groupby(lengths) if n]
    found = [qkv[total:, 0].masked_fill(qkv.new_ones((), dtype=torch.bool), 0.0)]
    parts = torch.split(used, [n * count for n, count in runs])
    for (n, count), part in zip(runs, parts, strict=True):
        q, k, v = part.reshape(count, n, *part.shape[1:]).permute(2, 0, 3, 1, 4)
        y = attend(q, k, v, dropout=dropout)
        found.insert(-1, y.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)


class FMHAFun(Applied):
    """Autograd function of attention in packed sequences; call ``FMHAFun.apply``.

    :meth:`function` describes the arguments.
    """

    function = staticmethod(attention)
    gradient, autocasts, keeps_graph = "dout", True, True


class FMHA(torch.nn.Module):
    """Multi-head self-attention of packed sequences, without projections and parameters.

    Args:
        config: Object with the attributes ``hidden_size``, ``num_attention_heads`` and
            ``attention_probs_dropout_prob``.

    Raises:
        ArgumentError: The number of heads does not divide the hidden size.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.p_dropout, self.h = config.attention_probs_dropout_prob, config.num_attention_heads
        self.hidden_size, self.d = config.hidden_size, config.hidden_size // self.h
        if self.d * self.h != self.hidden_size:
            raise ArgumentError(
                f"FMHA: hidden_size is {self.hidden_size} and num_attention_heads {self.h}. Pass a "
                "hidden_size that is divisible by the number of heads."
            )

    def forward(
        self, qkv: Tensor, cu_seqlens: Tensor, max_s: int, is_training: bool = True,
        zero_tensors: bool = False,
    ) -> Tensor:  # fmt: skip
        """Attend within each sequence.

        ``qkv`` is ``(total, 3 * hidden_size)`` and the result ``(total, hidden_size)``. See
        :meth:`FMHAFun.function` for the other arguments.
        """
        heads = qkv.reshape(len(qkv), 3, self.h, self.d)
        y = attention(heads, cu_seqlens, self.p_dropout, max_s, is_training, zero_tensors)
        return y.flatten(1)
