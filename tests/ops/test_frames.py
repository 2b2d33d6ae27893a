"""How many Python calls an operation adds to those of torch's own module.

A count does not depend on the machine.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex.contrib.group_norm import GroupNorm
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.fused_dense import FusedDense, FusedDenseGeluDense
from apex.mlp import MLP
from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from apex.ops.layers.swiglu import swiglu
from apex.transformer.functional import fused_apply_rotary_pos_emb
from apex.transformer.functional.fused_softmax import (
    scaled_masked_softmax,
    scaled_upper_triang_masked_softmax,
)
from tests.amp.test_frames import frames_of

BF16 = torch.bfloat16
X, IMAGES, LABELS = torch.ones(4, 64), torch.ones(2, 8, 4, 4), torch.ones(4, dtype=torch.int64)
NORM, LAST = nn.GroupNorm(2, 8), IMAGES.to(memory_format=torch.channels_last)
SCORES, MASK = torch.ones(2, 2, 8, 8), torch.eye(8).bool().expand(2, 1, 8, 8)
WEIGHT, ANGLES = torch.ones(8, 64), torch.ones(2, 1, 1, 8)
# For more elements than `above` of pieces that do not serve them.
MANY, LARGE = torch.ones(2**14, 64), torch.ones(2, 8, 128, 129)


def losses(x, labels):
    return F.cross_entropy(x, labels, reduction="none", ignore_index=0)


def linear_losses(x, weight, labels):
    return F.cross_entropy(F.linear(x, weight), labels)


def images_normalized(images):
    y = F.silu(NORM(images.contiguous()))
    return y.contiguous(memory_format=torch.channels_last)


def masked_softmax(scores, mask, scale):
    """The shortest that gives zeros where all is masked."""
    z = torch.where(mask, -10000.0, scores * scale)
    return torch.softmax(z, -1).masked_fill(z.amax(-1, keepdim=True) <= -10000.0, 0.0)


def masked_by_ones(scores, mask, scale):
    return masked_softmax(scores, mask == 1, scale)


def causal_softmax(scores, _, scale):
    above = scores.new_full(scores.shape[-2:], -torch.inf).triu(1)
    return torch.softmax((scores * scale).tril() + above, -1).tril()


def rows_multiplied(in1, in2, index):
    return torch.embedding(in1, index) * in2


def widened(function):
    """A function in float32, rounded once: what our own of 16 bits computes."""

    def of_16_bits(x, *rest):
        return function(x.float(), *rest).to(x.dtype)

    return of_16_bits


def layer_norm(x):
    return F.layer_norm(x, (64,), ONE.float(), ZERO.float(), 1e-5)


def rotated(t, freqs):
    first, second = t.chunk(2, -1)
    return torch.addcmul(t * freqs.cos(), torch.cat([-second, first], -1), freqs.sin())


def gated(gate, up):
    return F.silu(gate) * up


def dense_gelu_dense():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(approximate="tanh"), nn.Linear(64, 64))


def perceptron():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())


ONE, ZERO = torch.ones(64, dtype=BF16), torch.zeros(64, dtype=BF16)
NARROW_NORM = FusedLayerNorm(64, dtype=BF16)
SMALL = {  # ours, torch's, arguments, calls that ours adds at most
    "layer norm": (FusedLayerNorm(64), nn.LayerNorm(64), (X,), 3),
    "layer norm, mixed": (MixedFusedLayerNorm(64), nn.LayerNorm(64), (X,), 3),
    "layer norm, fast": (FastLayerNorm(64), nn.LayerNorm(64), (X,), 3),
    "RMS norm": (FusedRMSNorm(64), nn.RMSNorm(64, 1e-5), (X,), 4),
    "RMS norm, mixed": (MixedFusedRMSNorm(64), nn.RMSNorm(64, 1e-5), (X,), 4),
    "group norm": (GroupNorm(2, 8), nn.GroupNorm(2, 8), (IMAGES,), 1),
    "group norm, SiLU": (
        GroupNorm(2, 8, act="silu"), nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), (IMAGES,), 0,
    ),
    "group norm, channels last": (GroupNorm(2, 8, act="silu"), images_normalized, (LAST,), 1),
    "cross-entropy": (SoftmaxCrossEntropyLoss.apply, losses, (X, LABELS), 2),
    "masked softmax": (scaled_masked_softmax, masked_softmax, (SCORES, MASK, 0.5), 4),
    "causal softmax": (
        scaled_upper_triang_masked_softmax, causal_softmax, (SCORES[0], None, 0.5), 5,
    ),
    "index_mul_2d": (index_mul_2d, rows_multiplied, (X, X, LABELS), 3),
    "dense": (FusedDense(64, 64), nn.Linear(64, 64), (X,), 3),
    "dense, GELU, dense": (FusedDenseGeluDense(64, 64, 64), dense_gelu_dense(), (X,), -5),
    "MLP": (MLP([64, 64, 64]), perceptron(), (X,), -11),
    "SwiGLU": (swiglu, gated, (X, X), 2),
    "layer norm, bfloat16": (NARROW_NORM, widened(layer_norm), (X.to(BF16),), 6),
    "layer norm, many": (FusedLayerNorm(64), nn.LayerNorm(64), (MANY,), 6),
    "group norm, large": (GroupNorm(2, 8), nn.GroupNorm(2, 8), (LARGE,), 6),
    "group norm, SiLU, bfloat16": (
        GroupNorm(2, 8, act="silu", dtype=BF16), widened(lambda x: F.silu(NORM(x))),
        (IMAGES.to(BF16),), 0,
    ),
    "masked softmax, bfloat16, uint8": (
        scaled_masked_softmax, widened(masked_by_ones),
        (SCORES.to(BF16), MASK.to(torch.uint8), 0.5), 2,
    ),
    "linear cross-entropy": (linear_cross_entropy, linear_losses, (X, WEIGHT, LABELS), 12),
    "rotary": (fused_apply_rotary_pos_emb, rotated, (SCORES, ANGLES), 7),
}  # fmt: skip


def added(ours, theirs, args):
    """Frames of a call of ours above those of torch's; the first calls have been made."""
    counts = []
    for call in (ours, theirs):
        call(*args)
        counts.append(frames_of(lambda call=call: call(*args)))
    counts[0].subtract(counts[1])
    return counts[0]


@pytest.mark.parametrize("name", SMALL)
def test_falling_back_costs_next_to_nothing(name):
    """Below the threshold a call is torch's own function, after one decision."""
    ours, theirs, args, most = SMALL[name]
    found = added(ours, theirs, args)
    assert found.total() <= most, sorted(found.items())
    assert sum(n for (file, _), n in found.items() if "/apex/" in file) <= 13


@pytest.mark.parametrize(
    "name",
    [
        "layer norm", "RMS norm", "group norm", "group norm, channels last",
        "dense", "masked softmax", "causal softmax", "index_mul_2d", "layer norm, bfloat16",
        "layer norm, many", "group norm, large", "group norm, SiLU, bfloat16",
        "masked softmax, bfloat16, uint8", "rotary",
    ],
)  # fmt: skip
def test_what_falls_back_is_torchs_result(name):
    ours, theirs, args, _ = SMALL[name]
    torch.manual_seed(0)
    args = [
        torch.randn_like(a) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in args
    ]
    if isinstance(ours, nn.Module) and isinstance(theirs, nn.Module):
        ours.load_state_dict(theirs.state_dict())
    y, expected = ours(*args), theirs(*args)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
