"""Old name of NVIDIA's Apex: attention of packed sequences and its probabilities, without autograd.

A module of compiled Apex. Arguments are positional only; any device and floating dtype. ``qkv`` is
``(total, 3, heads, head_dim)``, ``cu_seqlens`` ``(sequences + 1,)``, and the probabilities
``(sequences, heads, max_seq_len, max_seq_len)``, whose sign bit is set where dropout dropped one.
All is computed in float32 (float64 for float64). ``apex.contrib.fmha`` needs less memory.

Programs of 2020 leave out ``is_nl`` and ``zero_tensors``, and call ``fwd_nl`` for few sequences.
"""

import itertools

import torch

from apex.contrib.fmha.fmha import lengths_of
from apex.ops._check import check_shape
from apex.ops._dtypes import wide

__all__ = ["bwd", "bwd_nl", "fwd", "fwd_nl"]

Tensor = torch.Tensor


def _sequences(name: str, qkv: Tensor, ends: Tensor, p: float, longest: int) -> list[slice]:
    lengths_of(f"fmhalib.{name}", qkv, ends, p, longest)
    return [slice(*pair) for pair in itertools.pairwise(ends.tolist())]


def _heads(x: Tensor) -> Tensor:
    return x.to(wide(x)).movedim(0, -2)  # (..., heads, tokens, head_dim)


@torch.no_grad()
def fwd(
    qkv: Tensor, cu_seqlens: Tensor, p_dropout: float, max_seq_len: int, is_training: bool,
    is_nl: bool | torch.Generator | None, zero_tensors: bool = False,
    gen_: torch.Generator | None = None, /,
) -> list[Tensor]:  # fmt: skip
    """Compute ``[output (total, heads, head_dim), probabilities]``.

    ``gen_`` is the generator of dropout, or None; of six arguments it is the last. ``is_nl``, which
    was for few sequences, and ``zero_tensors`` have no effect: what belongs to no sequence is 0.
    """
    gen_ = is_nl if isinstance(is_nl, torch.Generator) else gen_
    sequences = _sequences("fwd", qkv, cu_seqlens, p_dropout, max_seq_len)
    p, (heads, size) = p_dropout if is_training else 0.0, qkv.shape[2:]
    y = torch.zeros_like(qkv[:, 0])
    kept = qkv.new_zeros(len(sequences), heads, max_seq_len, max_seq_len)
    for tokens, signed in zip(sequences, kept, strict=True):
        (q, k, v), n = _heads(qkv[tokens]), tokens.stop - tokens.start
        found = (q @ k.mT * size**-0.5).softmax(-1)
        drawn = torch.empty_like(found).uniform_(generator=gen_) if p else torch.ones_like(found)
        values = found.masked_fill(drawn < p, 0.0) @ v / (1 - p or 1)
        y[tokens] = values.movedim(0, 1)
        signed[:, :n, :n] = torch.where(drawn < p, -found, found)
    return [y, kept]


def fwd_nl(
    qkv: Tensor, cu_seqlens: Tensor, p_dropout: float, max_seq_len: int, is_training: bool,
    gen_: torch.Generator | None, /,
) -> list[Tensor]:  # fmt: skip
    """As :func:`fwd`."""
    return fwd(qkv, cu_seqlens, p_dropout, max_seq_len, is_training, gen_)


@torch.no_grad()
def bwd(
    dout: Tensor, qkv: Tensor, softmax: Tensor, cu_seqlens: Tensor, p_dropout: float,
    max_seq_len: int, zero_tensors: bool = False, /,
) -> list[Tensor]:  # fmt: skip
    """Compute the gradients of ``[qkv, scores]``, the latter of the shape of ``softmax``.

    ``softmax`` is what :func:`fwd` returned, and ``p_dropout`` 0 if that was not in training.
    ``dout`` is ``(total, heads, head_dim)``, or ``(sequences, max_seq_len, heads, head_dim)`` if
    all sequences have that length.
    """
    sequences = _sequences("bwd", qkv, cu_seqlens, p_dropout, max_seq_len)
    (total, _, heads, size), reason = qkv.shape, f"qkv {list(qkv.shape)}"
    dout = dout.flatten(0, 1) if dout.dim() == 4 else dout
    check_shape("fmhalib.bwd", "dout", dout, (total, heads, size), reason)
    shape = (len(sequences), heads, max_seq_len, max_seq_len)
    check_shape("fmhalib.bwd", "softmax", softmax, shape, f"{reason}, {shape[0]} sequences")
    dqkv, dscores, scale = torch.zeros_like(qkv), torch.zeros_like(softmax), size**-0.5
    for tokens, signed, result in zip(sequences, softmax, dscores, strict=True):
        (q, k, v), n = _heads(qkv[tokens]), tokens.stop - tokens.start
        dy = _heads(dout[tokens]) / (1 - p_dropout or 1)
        found, dropped = signed[:, :n, :n].abs().to(q.dtype), signed[:, :n, :n].signbit()
        slope = (dy @ v.mT).masked_fill(dropped, 0.0)
        ds = found * (slope - (slope * found).sum(-1, keepdim=True))
        dv = found.masked_fill(dropped, 0.0).mT @ dy
        dqkv[tokens] = torch.stack([ds @ k * scale, ds.mT @ q * scale, dv]).movedim(2, 0)
        result[:, :n, :n] = ds
    return [dqkv, dscores]


def bwd_nl(
    dout: Tensor, qkv: Tensor, softmax: Tensor, cu_seqlens: Tensor, p_dropout: float,
    max_seq_len: int, zero_tensors: bool = False, /,
) -> list[Tensor]:  # fmt: skip
    """As :func:`bwd`, and the gradients of keys and values, ``(total, 1, 2, heads, head_dim)``."""
    found = bwd(dout, qkv, softmax, cu_seqlens, p_dropout, max_seq_len, zero_tensors)
    return [*found, found[0][:, None, 1:]]
