"""Rotary position embeddings; formula and errors: :mod:`apex.ops.layers.rotary`.

``t`` has any floating dtype, which the result has, and any strides. Angles, or cos and sin, have
any floating dtype and no gradient; the product is computed in float32 and rounded once.
"""

from typing import Any

import torch
from torch import Tensor

from apex.ops.layers import rotary as ops
from apex.ops.norms._scripted import left_to_python

__all__ = [
    "FusedRoPE2DFunc",
    "FusedRoPECachedFunc",
    "FusedRoPEFunc",
    "FusedRoPETHDFunc",
    "fused_apply_rotary_pos_emb",
    "fused_apply_rotary_pos_emb_2d",
    "fused_apply_rotary_pos_emb_cached",
    "fused_apply_rotary_pos_emb_thd",
]


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
    return ops.by_angles(t, freqs, transpose_output_memory).rotate(t)


@left_to_python
def fused_apply_rotary_pos_emb_cached(
    t: Tensor, cos_: Tensor, sin_: Tensor, transpose_output_memory: bool = False
) -> Tensor:
    """Do the same by cos and sin, both of the shape of ``freqs``; their halves may differ."""
    return ops.by_tables(t, cos_, sin_, transpose_output_memory).rotate(t)


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


class _Rotated(torch.autograd.Function):
    """To be called by ``.apply``, as the function of this name."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        cos, sin, positions = ctx.saved_tensors
        dt = ops.Rotation(cos, sin, positions, ctx.dim).back(grad_output)
        return (dt, *[None] * (len(ctx.needs_input_grad) - 1))


def _kept(ctx: Any, t: Tensor, rotation: ops.Rotation) -> Tensor:
    *tables, ctx.dim = rotation
    ctx.save_for_backward(*tables)
    return rotation.rotate(t)


class FusedRoPEFunc(_Rotated):
    """:func:`fused_apply_rotary_pos_emb`, to be called by ``.apply``."""

    @staticmethod
    def forward(
        ctx: Any, t: Tensor, freqs: Tensor, transpose_output_memory: bool = False
    ) -> Tensor:
        """Rotate."""
        return _kept(ctx, t, ops.by_angles(t, freqs, transpose_output_memory))


class FusedRoPECachedFunc(_Rotated):
    """:func:`fused_apply_rotary_pos_emb_cached`, to be called by ``.apply``."""

    @staticmethod
    def forward(
        ctx: Any, t: Tensor, cos_: Tensor, sin_: Tensor, transpose_output_memory: bool = False
    ) -> Tensor:
        """Rotate."""
        return _kept(ctx, t, ops.by_tables(t, cos_, sin_, transpose_output_memory))


class FusedRoPETHDFunc(_Rotated):
    """:func:`fused_apply_rotary_pos_emb_thd`, to be called by ``.apply``."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
        """Rotate."""
        return _kept(ctx, t, ops.by_sequences(t, cu_seqlens, freqs))


class FusedRoPE2DFunc(_Rotated):
    """:func:`fused_apply_rotary_pos_emb_2d`, to be called by ``.apply``."""

    @staticmethod
    def forward(
        ctx: Any, t: Tensor, img_h: int, img_w: int,
        cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor,
    ) -> Tensor:  # fmt: skip
        """Rotate."""
        return _kept(ctx, t, ops.by_places(t, img_h, img_w, cos_h, sin_h, cos_w, sin_w))
