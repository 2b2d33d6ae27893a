"""Rotary position embeddings; formula and errors: :mod:`apex.ops.layers.rotary`.

``t`` has any floating dtype, which the result has, and any strides. Angles, or cos and sin, have
any floating dtype and no gradient; the product is computed in float32 and rounded once.
"""

from torch import Tensor

from apex.ops._function import Applied
from apex.ops.layers import rotary as ops
from apex.ops.norms._scripted import left_to_python


@left_to_python
def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False
) -> Tensor:
    """Rotate ``t`` ``(s, b, h, d)`` by angles ``freqs`` ``(s or more, 1, 1, rotated)``.

    ``rotated`` is even; channels behind it are copied. With ``transpose_output_memory`` the result,
    of the shape of ``t``, lies in memory as ``(b, s, h, d)``.

    Example:
        >>> t, freqs = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([torch.pi / 2, torch.pi / 2])
        >>> fused_apply_rotary_pos_emb(t[None, None, None], freqs[None, None, None]).round()
        tensor([[[[-0., 1., 5.]]]])
    """
    return ops.rotate_by_angles(t, freqs, transpose_output_memory)


@left_to_python
def fused_apply_rotary_pos_emb_cached(
    t: Tensor, cos_: Tensor, sin_: Tensor, transpose_output_memory: bool = False
) -> Tensor:
    """Do the same by cos and sin, both of the shape of ``freqs``; their halves may differ."""
    return ops.rotate_by_tables(t, cos_, sin_, transpose_output_memory)


@left_to_python
def fused_apply_rotary_pos_emb_thd(t: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
    """Rotate packed sequences, ``t`` ``(tokens, h, d)``, each of them from position 0 on.

    Args:
        t: All tokens, one sequence after the other.
        cu_seqlens: ``(sequences + 1,)`` int32 or int64: 0, then the end of each sequence. Tokens
            behind the last end are rotated by 0.
        freqs: ``(longest, 1, 1, rotated)``. Tokens of later positions become nan: lengths are on
            the device, and to check them the host would have to wait.
    """
    return ops.by_sequences(t, cu_seqlens, freqs).rotate(t)


@left_to_python
def fused_apply_rotary_pos_emb_2d(
    t: Tensor, img_h: int, img_w: int, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor
) -> Tensor:
    """Rotate images ``t`` ``(b, img_h * img_w, h, d)``.

    The first half of the channels by the row: ``cos_h`` and ``sin_h`` ``(1, img_h or more, 1,
    d / 2)``. The second half by the column: ``cos_w`` and ``sin_w``, likewise.
    """
    return ops.by_places(t, img_h, img_w, cos_h, sin_h, cos_w, sin_w).rotate(t)


class FusedRoPEFunc(Applied):
    """:func:`fused_apply_rotary_pos_emb`, to be called by ``.apply``."""

    function = staticmethod(fused_apply_rotary_pos_emb)


class FusedRoPECachedFunc(Applied):
    """:func:`fused_apply_rotary_pos_emb_cached`, to be called by ``.apply``."""

    function = staticmethod(fused_apply_rotary_pos_emb_cached)


class FusedRoPETHDFunc(Applied):
    """:func:`fused_apply_rotary_pos_emb_thd`, to be called by ``.apply``."""

    function = staticmethod(fused_apply_rotary_pos_emb_thd)


class FusedRoPE2DFunc(Applied):
    """:func:`fused_apply_rotary_pos_emb_2d`, to be called by ``.apply``."""

    function = staticmethod(fused_apply_rotary_pos_emb_2d)
