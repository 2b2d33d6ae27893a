"""Norms and losses, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apex.catalogue import tolerance
from apex.catalogue.entry import (
    IMAGES,
    MATRICES,
    ROWS,
    Checked,
    Function,
    Leaf,
    Op,
    Shape,
    Timed,
)
from apex.contrib.focal_loss import focal_loss
from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.normalization import fused_layer_norm as norms
from apex.ops.losses import cross_entropy
from apex.ops.losses import focal_loss as focal_loss_op
from apex.ops.norms import group_norm, row_norms

__all__ = ["OPS"]

EPS = 1e-5
PADDING = 3  # the class of rows that do not count
SMOOTHING = 0.1
FEATURES = 256  # of the linear layer before the cross-entropy

WIDE = Checked(((2, 70_001),), ((64, 65_536),))  # rows wider than a block
PICTURES = Checked(((2, 36, 9, 7),), ((4, 320, 64, 64),))  # small: 32 groups take seconds
CLASSES = Checked(((7, 123), (4, 4097)), ((512, 32_768), (4096, 1000)))


def _rows(shape: Shape, params: int = 2) -> Sequence[Leaf]:
    """Rows off 0, and a norm's weights off 1 and biases."""
    columns = shape[-1:]
    return [Leaf(shape, 2.0, 0.5), Leaf(columns, 0.2, 1.0), Leaf(columns, 0.2)][: 1 + params]


def _float32_weights(shape: Shape) -> Sequence[Leaf]:
    x, *params = _rows(shape)
    return [x, *(param._replace(dtype=torch.float32) for param in params)]


def _images(shape: Shape) -> Sequence[Leaf]:
    return [Leaf(shape, 2.0, 0.5), *_rows((1, shape[1]))[1:]]


def _logits(shape: Shape) -> Sequence[Leaf]:
    return [Leaf(shape, 2.0)]


# --- norms ----------------------------------------------------------------------------------------


def _norm(function: Any, memory_efficient: bool = False) -> Function:
    return lambda x, *params: function(x, *params, params[0].shape, EPS, memory_efficient)


def _of_operator(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: torch.dtype
) -> tuple[Any, ...]:
    """The operator's arguments; ``more`` is what the memory-efficient one takes besides."""
    return x, weight, bias, x.shape[-1:], EPS, bias is not None, x.dtype, *more


def _of_memory_efficient(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    return _of_operator(x, weight, bias, x.dtype)


def _fast_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    layer = FastLayerNorm(len(weight), EPS)  # wherever its own parameters are
    y: Tensor = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))
    return y


def _torchs_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _torchs_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _rms_norm_written_out(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def _groups(x: Tensor) -> tuple[int]:
    return (next(count for count in (32, 3, 1) if x.shape[1] % count == 0),)


def _group_norm(act: str) -> Function:
    return lambda x, weight, bias, groups: group_norm.group_norm(
        x, groups, weight, bias, eps=EPS, act=act
    )


def _torchs_group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    # What F.group_norm calls after it has refused the single element of the host's cost.
    # torch 2.14 refuses images without elements.
    return torch.group_norm(x, groups, weight, bias, EPS) if x.numel() else torch.empty_like(x)


# --- losses ---------------------------------------------------------------------------------------


def _labels(smoothing: float, logits: Tensor) -> tuple[Tensor, float, int]:
    """Labels, the first of them that of rows to leave out; smoothing; that label."""
    rows, classes = logits.shape
    return (11 * torch.arange(rows, device=logits.device) + PADDING) % classes, smoothing, PADDING


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _torchs_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float, padding: int) -> Tensor:
    return F.cross_entropy(
        _at_least_float32(logits), labels, reduction="none", label_smoothing=smoothing,
        ignore_index=padding,
    )  # fmt: skip


def _before_logits(shape: Shape) -> Sequence[Leaf]:
    rows, classes = shape
    return [Leaf((rows, FEATURES)), Leaf((classes, FEATURES), FEATURES**-0.5)]


def _classes(x: Tensor) -> tuple[Tensor]:
    """Labels below 100, of which that of padding is one."""
    return (11 * torch.arange(len(x), device=x.device) % 100,)


def _linear_cross_entropy(chunks: int | None) -> Function:
    def ours(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        labels, rows = labels % len(weight), chunks and len(x) // chunks
        return linear_cross_entropy(x, weight, labels, ignore_index=PADDING, chunk_size=rows)

    return ours


def _torchs_linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = _at_least_float32(F.linear(x, weight))
    return F.cross_entropy(logits, labels % len(weight), ignore_index=PADDING)


def _targets(logits: Tensor) -> tuple[Any, ...]:
    """Background in every other anchor; how many are not; and the numbers of a focal loss."""
    labels = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    labels[::2] = -1
    return labels, (labels >= 0).sum(dtype=torch.float32).view(1), logits.shape[1], 0.25, 2.0, 0.0


def _smooth_targets(logits: Tensor) -> tuple[Any, ...]:
    """Targets from -2 on, which do not count; and columns of padding."""
    rows, columns = logits.shape
    classes = columns - columns // 8
    targets = torch.arange(rows, device=logits.device) % (classes + 2) - 2
    positives = torch.full((1,), 3.0, device=logits.device, dtype=torch.float32)
    return targets, positives, classes, 0.25, 2.0, SMOOTHING


def _torchs_focal_loss(
    logits: Tensor, targets: Tensor, positives: Tensor, classes: int, alpha: float, gamma: float,
    smoothing: float,
) -> Tensor:  # fmt: skip
    x = _at_least_float32(logits)[:, :classes]
    y = (targets[:, None] == torch.arange(classes, device=x.device)).to(x.dtype)
    p = torch.sigmoid(x)
    wanted = smoothing / 2 + (1 - smoothing) * y if smoothing else y
    entropy = F.binary_cross_entropy_with_logits(x, wanted, reduction="none")
    weight = (alpha * y + (1 - alpha) * (1 - y)) * (p * (1 - y) + (1 - p) * y) ** gamma
    loss = weight * entropy
    if smoothing:  # such targets have anchors that do not count
        loss = loss[targets != -2]
    return loss.sum() / positives[0]


_LAYER_NORM = norms.fused_layer_norm_affine
_RMS_NORM = norms.fused_rms_norm_affine
_ONE_WEIGHT = partial(_rows, params=1)
# What the variants of an op share.
_OF_GROUP_NORM: dict[str, Any] = {
    "checked": PICTURES, "in_eps": {torch.float32: tolerance.GROUP_NORM},
    "layout": torch.channels_last,
}  # fmt: skip
_OF_LOSS: dict[str, Any] = {
    "of_matrix": lambda shape: (math.prod(shape[:-1]) if shape[-1] else 0, shape[-1]),
    "widens": True, "terms": 512,
}  # fmt: skip

OPS: tuple[Op, ...] = (
    Op(
        "layer_norm", _norm(_LAYER_NORM), _torchs_layer_norm, _rows, checked=ROWS,
        timed=Timed(
            MATRICES, (2, 3), liger=lambda liger, *inputs: liger.liger_layer_norm(*inputs, EPS)
        ),
        operator=row_norms.OP, arguments=_of_operator,
    ),
    Op(
        "layer_norm, wide rows", _norm(_LAYER_NORM), _torchs_layer_norm, _rows, checked=WIDE,
        dtypes=("fp32",),
    ),
    Op(
        "layer_norm, fp32 weights", _norm(norms.mixed_dtype_fused_layer_norm_affine),
        _torchs_layer_norm, _float32_weights, checked=ROWS, dtypes=("bf16",),
    ),
    Op(
        "layer_norm, memory-efficient", _norm(_LAYER_NORM, memory_efficient=True),
        _torchs_layer_norm, _rows, checked=ROWS, dtypes=("fp32",),
        operator=row_norms.MEMORY_EFFICIENT, arguments=_of_memory_efficient,
    ),
    Op(
        "layer_norm, fast", _fast_layer_norm, _torchs_layer_norm, _rows, checked=ROWS,
        dtypes=("fp16",),
    ),
    Op(
        "rms_norm", _norm(_RMS_NORM), _torchs_rms_norm, _ONE_WEIGHT, checked=ROWS,
        timed=Timed(
            MATRICES, (2, 3), _rms_norm_written_out,
            lambda liger, *inputs: liger.liger_rms_norm(*inputs, EPS, in_place=False),
        ),
        operator=row_norms.OP, arguments=_of_operator, fused_by="compiler",
    ),
    Op(
        "rms_norm, wide rows", _norm(_RMS_NORM), _torchs_rms_norm, _ONE_WEIGHT, checked=WIDE,
        dtypes=("bf16",),
    ),
    Op(
        "rms_norm, memory-efficient", _norm(_RMS_NORM, memory_efficient=True), _torchs_rms_norm,
        _ONE_WEIGHT, checked=ROWS, dtypes=("fp32",), operator=row_norms.MEMORY_EFFICIENT,
        arguments=_of_memory_efficient,
    ),
    Op(
        "group_norm", _group_norm(""), _torchs_group_norm, _images, _groups, **_OF_GROUP_NORM,
        timed=Timed(
            IMAGES, (2, 3),
            liger=lambda liger, x, weight, bias, groups: liger.liger_group_norm(
                x, weight, bias, x.shape[1], groups, EPS
            ),
        ),
    ),
    Op(
        "group_norm, SiLU", _group_norm("silu"),
        lambda *inputs: F.silu(_torchs_group_norm(*inputs)), _images, _groups,
        **_OF_GROUP_NORM, operator=group_norm.OP, arguments=lambda *inputs: (*inputs, EPS, True),
        of_matrix=lambda shape: (2, 3 * -(-math.prod(shape[1:]) // 4), shape[0], 2),
    ),
    Op(
        "cross_entropy", SoftmaxCrossEntropyLoss.apply, _torchs_cross_entropy, _logits,
        partial(_labels, 0.0), checked=CLASSES,
        timed=Timed(
            MATRICES, (1, 2),
            liger=lambda liger, x, labels, *_: liger.liger_cross_entropy(
                x, labels, ignore_index=PADDING, reduction="none"
            ),
        ),
    ),
    Op(
        "cross_entropy, smoothed", SoftmaxCrossEntropyLoss.apply, _torchs_cross_entropy, _logits,
        partial(_labels, SMOOTHING), checked=CLASSES, dtypes=("bf16",),
        operator=cross_entropy.OP, **_OF_LOSS,
    ),
    Op(
        "linear_cross_entropy", _linear_cross_entropy(None), _torchs_linear_cross_entropy,
        _before_logits, _classes,
        timed=Timed(
            MATRICES, None,
            liger=lambda liger, *inputs: liger.liger_fused_linear_cross_entropy(*inputs),
        ),
    ),
    Op(
        "linear_cross_entropy, in chunks", _linear_cross_entropy(3), _torchs_linear_cross_entropy,
        _before_logits, _classes, checked=Checked(((33, 100),), ((1024, 32_768),)),
        in_eps=tolerance.PRODUCTS,
    ),
    Op(
        "focal_loss", focal_loss, _torchs_focal_loss, _logits, _targets,
        timed=Timed(MATRICES, (1, 2)),
    ),
    Op(
        "focal_loss, smoothed", focal_loss, _torchs_focal_loss, _logits, _smooth_targets,
        checked=Checked(ROWS.small, CLASSES.busy), operator=focal_loss_op.OP,
        fused_by="compiler", **_OF_LOSS,
    ),
)  # fmt: skip
