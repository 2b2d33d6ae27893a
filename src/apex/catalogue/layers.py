"""Layers of transformers, and elementwise ops."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apex.catalogue import tolerance
from apex.catalogue.entry import (
    ATTENTION,
    CAUSAL,
    HEAD,
    HEADS,
    MATRICES,
    ROTARY,
    ROWS,
    SCORES,
    Checked,
    Leaf,
    Op,
    Shape,
    Timed,
)
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.multihead_attn import SelfMultiheadAttn
from apex.fused_dense.fused_dense import _fused_dense_gelu_dense
from apex.mlp import mlp_function, swiglu
from apex.ops.layers import index_mul_2d as index_mul_2d_op
from apex.ops.layers import rotary, scaled_softmax
from apex.ops.layers import swiglu as swiglu_op
from apex.transformer.functional import fused_apply_rotary_pos_emb
from apex.transformer.functional.fused_softmax import (
    scaled_masked_softmax,
    scaled_upper_triang_masked_softmax,
)

__all__ = ["OPS"]

FEATURES = 256  # of the narrow side of dense layers
SCALE = HEAD**-0.5
MASKED = -10000.0  # what the softmaxes put instead of a masked logit

# --- elementwise ----------------------------------------------------------------------------------


def _picked(shape: Shape) -> Sequence[Leaf]:
    """A matrix, and one whose rows are picked, about four times each."""
    return [Leaf(shape), Leaf((max(4, shape[0] // 4), shape[1]))]


def _index(in2: Tensor) -> tuple[Tensor]:
    """Rows in no order, the last of them left out."""
    rows = torch.arange(len(in2), device=in2.device)
    return ((7 * rows + 2) % (max(4, len(in2) // 4) - 1),)


def _freqs(part: float, t: Tensor) -> tuple[Tensor]:
    """Float32 angles of a part of the channels; those of two channels of a pair differ."""
    half = int(t.shape[-1] * part) // 2
    speeds = 1e4 ** -torch.linspace(0, 1, 2 * half, device=t.device, dtype=torch.float32)
    return (torch.arange(1, 1 + len(t), device=t.device)[:, None, None, None] * speeds,)


def _torchs_rotary(t: Tensor, freqs: Tensor) -> Tensor:
    angles = freqs.to(torch.promote_types(t.dtype, torch.float32))
    cos, sin = angles.cos().to(t.dtype), angles.sin().to(t.dtype)
    rest = t[..., freqs.shape[-1] :]
    t = t[..., : freqs.shape[-1]]
    first, second = t.chunk(2, dim=-1)
    y = t * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([y, rest], dim=-1) if rest.shape[-1] else y


def _ligers_rotary(liger: Any, t: Tensor, freqs: Tensor) -> Tensor:
    """Liger-Kernel rotates queries and keys, [batch, heads, sequence, channels]: one key."""
    query, freqs = t.permute(1, 2, 0, 3), freqs[:, 0].transpose(0, 1)
    query, _ = liger.liger_rope(query, query[:, :1], freqs.cos(), freqs.sin())
    turned: Tensor = query.permute(2, 0, 1, 3)
    return turned


# --- softmaxes ------------------------------------------------------------------------------------


def _mask(empty: bool, x: Tensor) -> tuple[Tensor, float]:
    """A mask that the heads share, and a scale.

    With ``empty`` it is uint8, 1 is masked and 2 is not; the last query has no key. A larger scale
    then: of equal probabilities the gradient is what cancellation leaves.
    """
    queries, keys = x.shape[-2:]
    mask = torch.arange(queries * keys, device=x.device).view(1, 1, queries, keys) % 3
    if empty:
        mask[..., -1:, :] = 1
    elif keys == 1:
        mask.zero_()
    return (mask.to(torch.uint8), 0.7) if empty else (mask == 1, SCALE)


def _torchs_masked_softmax(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.softmax((x * scale).masked_fill(mask, MASKED), dim=-1)


def _torchs_emptied_softmax(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same where a query may have no key: its probabilities are 0."""
    masked = mask == 1
    return _torchs_masked_softmax(x, masked, scale).masked_fill(masked.all(-1, keepdim=True), 0.0)


# --- products of matrices -------------------------------------------------------------------------


def _two_layers(shape: Shape) -> Sequence[Leaf]:
    """Rows, and weight and bias of a layer to ``columns`` features and of one back."""
    rows, columns = shape
    return [
        Leaf((rows, FEATURES)), Leaf((columns, FEATURES), FEATURES**-0.5), Leaf((columns,)),
        Leaf((FEATURES, columns), columns**-0.5), Leaf((FEATURES,)),
    ]  # fmt: skip


def _weights(shape: Shape) -> Sequence[Leaf]:
    """Weights for queries, keys, values and the result."""
    return [Leaf(shape), *[Leaf(shape[2:] * 2, shape[2] ** -0.5)] * 4]


@functools.cache
def _module(features: int, heads: int) -> torch.nn.Module:
    with torch.device("meta"):  # the weights are those that are passed
        return SelfMultiheadAttn(features, heads, separate_qkv_params=True)


def _attention(x: Tensor, *inputs: Any) -> Tensor:
    *weights, heads = inputs
    names = ("q_weight", "k_weight", "v_weight", "out_proj_weight")
    named = dict(zip(names, weights, strict=True))
    y: Tensor = torch.func.functional_call(_module(x.shape[2], heads), named, (x, x, x))[0]
    return y


def _torchs_attention(
    x: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, heads: int
) -> Tensor:
    return F.multi_head_attention_forward(
        x, x, x, x.shape[2], heads, None, None, None, None, False, 0.0, out, None,
        need_weights=False, use_separate_proj_weight=True,
        q_proj_weight=query, k_proj_weight=key, v_proj_weight=value,
    )[0]  # fmt: skip


def _attention_written_out(x: Tensor, *inputs: Any) -> Tensor:
    *weights, out, heads = inputs
    length, batch, features = x.shape
    query, key, value = (
        F.linear(x, w).view(length, batch * heads, -1).transpose(0, 1) for w in weights
    )
    scores = torch.softmax(query @ key.transpose(1, 2) * (features // heads) ** -0.5, -1)
    return F.linear((scores @ value).transpose(0, 1).reshape(length, batch, features), out)


def _scores(shape: Shape) -> Sequence[Leaf]:
    return [Leaf(shape, 2.0)]


OPS: tuple[Op, ...] = (
    Op(
        "swiglu", swiglu, lambda gate, up: F.silu(gate) * up,
        lambda shape: [Leaf(shape, 2.0), Leaf(shape)], checked=ROWS,
        operator=swiglu_op.OP, fused_by="compiler",
    ),
    Op(
        "dense_gelu_dense", _fused_dense_gelu_dense,
        lambda x, weight, bias, *second: F.linear(
            F.gelu(F.linear(x, weight, bias), approximate="tanh"), *second
        ),
        _two_layers, timed=Timed(MATRICES, None),
    ),
    Op(
        "mlp", lambda x, w1, b1, w2, b2: mlp_function(True, 1, x, w1, w2, b1, b2),
        lambda x, weight, bias, *second: F.linear(F.linear(x, weight, bias).relu(), *second).relu(),
        _two_layers, timed=Timed(MATRICES, None),
    ),
    Op(
        "masked_softmax", scaled_masked_softmax, _torchs_masked_softmax, _scores,
        partial(_mask, False), timed=Timed(SCORES, (2, 3)),
    ),
    Op(
        "masked_softmax, no key", scaled_masked_softmax, _torchs_emptied_softmax, _scores,
        partial(_mask, True), in_eps=tolerance.FROM_RESULT,
        checked=Checked(
            ((1, 2, 7, 123), (1, 2, 4, 4097)), ((1, 2, 4096, 1024), (1, 2, 1027, 4096))
        ),
        operator=scaled_softmax.OP, arguments=lambda *inputs: (*inputs, False),
        of_matrix=lambda shape: (*(1,) * (4 - len(shape)), *shape), terms=512,
    ),
    Op(
        "causal_softmax",
        lambda x, later: scaled_upper_triang_masked_softmax(x, None, SCALE),
        lambda x, later: torch.softmax((x * SCALE).masked_fill(later, -math.inf), dim=-1), _scores,
        lambda x: (torch.ones(x.shape[1:], dtype=torch.bool, device=x.device).triu(1),),
        dtypes=("bf16",), in_eps=tolerance.FROM_RESULT,
        checked=Checked(((3, 33, 33),), ((8, 2048, 2048),)),
        # Half of what is read lies above the diagonal and is left out.
        timed=Timed(CAUSAL, (1.5, 2)),
    ),
    Op(
        "rotary", fused_apply_rotary_pos_emb, _torchs_rotary,
        lambda shape: [Leaf(shape)], partial(_freqs, 1.0),
        timed=Timed(ROTARY, (2, 2), liger=_ligers_rotary),
    ),
    Op(
        "rotary, three quarters", fused_apply_rotary_pos_emb, _torchs_rotary,
        lambda shape: [Leaf(shape)], partial(_freqs, 0.75), operator=rotary.OP,
        checked=Checked(((5, 2, 3, 16), (9, 1, 20, 128)), ((4096, 1, 32, 128),)),
        arguments=lambda t, freqs: (t, freqs[:, 0, 0].cos(), freqs[:, 0, 0].sin(), None, 0),
        of_matrix=lambda shape: (2, 1, math.prod(shape[:-1]), shape[-1]), fused_by="compiler",
    ),
    Op(
        "attention", _attention, _torchs_attention, _weights,
        lambda x: (math.gcd(HEADS, x.shape[2]),),
        timed=Timed(ATTENTION, None, _attention_written_out),
    ),
    Op(
        "index_mul_2d", lambda in2, in1, index: index_mul_2d(in1, in2, index),
        lambda in2, in1, index: in1[index] * in2, _picked, _index, checked=ROWS,
        timed=Timed(MATRICES, (3, 5.25)), operator=index_mul_2d_op.OP,
        of_matrix=lambda shape: (math.prod(shape[:-1]) if shape[-1] else 0, shape[-1]),
    ),
)  # fmt: skip
