"""``fmhalib``: attention of packed sequences that returns its probabilities, without autograd.

A module of compiled Apex. Arguments are positional only; any device and floating dtype. ``qkv`` is
``(total, 3, heads, head_dim)``, ``cu_seqlens`` ``(sequences + 1,)``, and the probabilities
``(sequences, heads, max_seq_len, max_seq_len)``, whose sign bit is set where dropout dropped one.
Everything is computed in float32 (float64 for float64). ``apex.contrib.fmha`` needs less memory.
"""

import itertools
from collections.abc import Iterator

import torch

from apex.contrib.fmha.fmha import lengths_of
from apex.ops._check import check_shape
from apex.ops._dtypes import wide

__all__ = ["bwd", "bwd_nl", "fwd"]

Tensor = torch.Tensor


def _sequences(name: str, qkv: Tensor, ends: Tensor, p: float, longest: int) -> Iterator[slice]:
    lengths_of(f"fmhalib.{name}", qkv, ends, p, longest)
    return itertools.starmap(slice, itertools.pairwise(ends.tolist()))


def _heads(x: Tensor) -> Tensor:
    """Of ``(tokens, ..., heads, head_dim)``: ``(..., heads, tokens, head_dim)``, wide."""
    return x.to(wide(x)).movedim(0, -2)


def _scale(p_dropout: float) -> float:
    return 1 / (1 - p_dropout) if p_dropout < 1 else 0.0


@torch.no_grad()
def fwd(
    qkv: Tensor, cu_seqlens: Tensor, p_dropout: float, max_seq_len: int, is_training: bool,
    is_nl: bool, zero_tensors: bool, gen_: torch.Generator | None, /,
) -> list[Tensor]:  # fmt: skip
    """Compute ``[output (total, heads, head_dim), probabilities]``.

    ``gen_`` is the generator of dropout, or None. ``is_nl``, which was for few sequences, and
    ``zero_tensors`` have no effect: what belongs to no sequence is 0.
    """
    sequences = [*_sequences("fwd", qkv, cu_seqlens, p_dropout, max_seq_len)]
    p, (heads, size) = p_dropout if is_training else 0.0, qkv.shape[2:]
    y = torch.zeros_like(qkv[:, 0])
    kept = qkv.new_zeros(len(sequences), heads, max_seq_len, max_seq_len)
    for tokens, signed in zip(sequences, kept, strict=True):
        q, k, v = _heads(qkv[tokens])
        probabilities = (q @ k.mT * size**-0.5).softmax(-1)
        drawn = torch.empty_like(probabilities).uniform_(generator=gen_)
        dropped = drawn < p if p else torch.zeros_like(drawn, dtype=torch.bool)
        y[tokens] = (probabilities.masked_fill(dropped, 0.0) @ v * _scale(p)).movedim(0, 1)
        n = len(q[0])
        signed[:, :n, :n] = torch.where(dropped, -probabilities, probabilities)
    return [y, kept]


@torch.no_grad()
def bwd(
    dout: Tensor, qkv: Tensor, softmax: Tensor, cu_seqlens: Tensor, p_dropout: float,
    max_seq_len: int, zero_tensors: bool, /,
) -> list[Tensor]:  # fmt: skip
    """Compute the gradients of ``[qkv, scores]``, the latter of the shape of ``softmax``.

    ``softmax`` is what :func:`fwd` returned, and ``p_dropout`` 0 if that was not in training.
    """
    sequences = _sequences("bwd", qkv, cu_seqlens, p_dropout, max_seq_len)
    reason = f"qkv {list(qkv.shape)}, with {len(cu_seqlens) - 1} sequences"
    check_shape("fmhalib.bwd", "dout", dout, (len(qkv), *qkv.shape[2:]), reason)
    wanted = (len(cu_seqlens) - 1, qkv.shape[2], max_seq_len, max_seq_len)
    check_shape("fmhalib.bwd", "softmax", softmax, wanted, reason)
    dqkv, dscores, scale = torch.zeros_like(qkv), torch.zeros_like(softmax), qkv.shape[3] ** -0.5
    for tokens, signed, result in zip(sequences, softmax, dscores, strict=True):
        (q, k, v), dy = _heads(qkv[tokens]), _heads(dout[tokens]) * _scale(p_dropout)
        n = len(q[0])
        probabilities, dropped = signed[:, :n, :n].abs().to(q.dtype), signed[:, :n, :n].signbit()
        dv = probabilities.masked_fill(dropped, 0.0).mT @ dy
        slope = (dy @ v.mT).masked_fill_(dropped, 0.0)
        ds = probabilities * (slope - (slope * probabilities).sum(-1, keepdim=True))
        result[:, :n, :n] = ds
        dqkv[tokens] = torch.stack([ds @ k * scale, ds.mT @ q * scale, dv]).movedim(2, 0)
    return [dqkv, dscores]


def bwd_nl(
    dout: Tensor, qkv: Tensor, softmax: Tensor, cu_seqlens: Tensor, p_dropout: float,
    max_seq_len: int, zero_tensors: bool, /,
) -> list[Tensor]:  # fmt: skip
    """As :func:`bwd`, and the gradients of keys and values, ``(total, 1, 2, heads, head_dim)``."""
    found = bwd(dout, qkv, softmax, cu_seqlens, p_dropout, max_seq_len, zero_tensors)
    return [*found, found[0][:, None, 1:]]
