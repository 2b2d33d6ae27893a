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
    """Rotate ``t`` ``(s, b, h, d)`` by the angles ``freqs`` ``(s or more, 1, 1, rotated)``.

    ``rotated`` must be even; further channels are copied. The result has the shape of ``t``. With
    ``transpose_output_memory`` its memory layout is ``(b, s, h, d)``.

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
    """Rotate ``t`` as :func:`fused_apply_rotary_pos_emb` does, with the cos and sin of the angles.

    Both have the shape of ``freqs``. Their two halves may differ.
    """
    return ops.rotate_by_tables(t, cos_, sin_, transpose_output_memory)


@left_to_python
def fused_apply_rotary_pos_emb_thd(t: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
    """Rotate packed sequences, each of which starts at position 0.

    Args:
        t: The tokens of all sequences in a row, ``(tokens, h, d)``.
        cu_seqlens: ``(sequences + 1,)`` in int32 or int64: 0, then the end of each sequence. Tokens
            after the last end are not rotated.
        freqs: ``(longest, 1, 1, rotated)``. Tokens at later positions become NaN. They raise no
            error, because the host would have to wait for the lengths.
    """
    return ops.by_sequences(t, cu_seqlens, freqs).rotate(t)


@left_to_python
def fused_apply_rotary_pos_emb_2d(
    t: Tensor, img_h: int, img_w: int, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor
) -> Tensor:
    """Rotate images ``t`` of shape ``(b, img_h * img_w, h, d)``.

    The angle of the first half of the channels depends on the row: ``cos_h`` and ``sin_h`` are
    ``(1, img_h or more, 1, d / 2)``. The angle of the second half depends on the column: ``cos_w``
    and ``sin_w`` are ``(1, img_w or more, 1, d / 2)``.
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
