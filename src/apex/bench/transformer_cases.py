"""What ``apex bench kernels`` times of transformers: dense layers, softmaxes, rotary, attention.

The product of rows that an index picks is here too.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from apex.bench.kernel_cases import Op, Shapes
from apex.bench.layer_modes import Inputs, compiled, each_mode, given, liger
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.multihead_attn import SelfMultiheadAttn
from apex.fused_dense.fused_dense import _fused_dense_gelu_dense
from apex.mlp import mlp_function
from apex.transformer.functional import fused_apply_rotary_pos_emb
from apex.transformer.functional.fused_softmax import (
    scaled_masked_softmax,
    scaled_upper_triang_masked_softmax,
)

__all__ = ["SHAPES", "TRANSFORMER"]

FEATURES = 256  # of the narrow side of dense layers
HEADS = 16
HEAD = 64  # channels of an attention head
SCALE = HEAD**-0.5
MASKED = -10000.0  # what the softmaxes put instead of a masked logit

Tensor = torch.Tensor
Sets = dict[str, Callable[[bool], Shapes]]

# --- shapes: as many elements as the matrices of the name, but for attention --------------------

SHAPES: dict[str, Sets] = {
    "softmax": {  # batch, heads, queries, keys
        "small": lambda full: [(1, HEADS, 128, 1024)],
        "middle": lambda full: [(1, HEADS, 256, 4096)],
        "wide": lambda full: [(1, HEADS, 128 if full else 16, 32768)],
    },
    "causal": {  # batch times heads, queries, keys
        "small": lambda full: [(2, 1024, 1024)],
        "middle": lambda full: [(1, 4096, 4096)],
        "wide": lambda full: [(16 if full else 2, 2048, 2048)],
    },
    "rotary": {  # sequence, batch, heads, channels
        "small": lambda full: [(2048, 1, 16, HEAD)],
        "middle": lambda full: [(4096, 1, 64, HEAD)],
        "wide": lambda full: [(2048 if full else 256, 8, 64, HEAD)],
    },
    "attention": {  # sequence, batch, features
        "small": lambda full: [(256, 8, 1024)],
        "middle": lambda full: [(1024, 8 if full else 1, 1024)],
        "wide": lambda full: [(4096 if full else 2048, 1, 1024)],
    },
}


# --- dense layers -------------------------------------------------------------------------------


def _two_layers(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Rows, and weight and bias of a layer to ``columns`` features and of one back."""
    [(rows, columns)] = shapes

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device).mul(scale).to(dtype)

    return (
        random(rows, FEATURES),
        random(columns, FEATURES, scale=FEATURES**-0.5),
        random(columns),
        random(FEATURES, columns, scale=columns**-0.5),
        random(FEATURES),
    )


def _dense() -> Iterator[Op]:
    def torch_s(
        x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
    ) -> Tensor:
        hidden = F.gelu(F.linear(x, weight1, bias1), approximate="tanh")
        return F.linear(hidden, weight2, bias2)

    who = (given("apex", _fused_dense_gelu_dense), given("torch", torch_s), compiled(torch_s))
    return each_mode("dense_gelu_dense", _two_layers, who, columns=None)


def _mlp() -> Iterator[Op]:
    def ours(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
        return mlp_function(True, 1, x, weight1, weight2, bias1, bias2)

    def torch_s(
        x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
    ) -> Tensor:
        return F.linear(F.linear(x, weight1, bias1).relu(), weight2, bias2).relu()

    who = (given("apex", ours), given("torch", torch_s), compiled(torch_s))
    return each_mode("mlp", _two_layers, who, columns=None)


# --- attention ----------------------------------------------------------------------------------


def _masked_softmax() -> Iterator[Op]:
    def make(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
        [(batch, heads, queries, keys)] = shapes
        mask = torch.rand(batch, 1, queries, keys, device=device) < 0.25
        return torch.randn(batch, heads, queries, keys, device=device).to(dtype), mask

    def torch_s(x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax((x * SCALE).masked_fill(mask, MASKED), dim=-1)

    who = (
        given("apex", lambda x, mask: scaled_masked_softmax(x, mask, SCALE)),
        given("torch", torch_s),
        compiled(torch_s),
    )
    return each_mode("masked_softmax", make, who, columns=(2, 3), shapes=SHAPES["softmax"])


def _causal_softmax() -> Iterator[Op]:
    def make(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
        [shape] = shapes
        later = torch.ones(shape[1:], dtype=torch.bool, device=device).triu(1)
        return torch.randn(shape, device=device).to(dtype), later

    def torch_s(x: Tensor, later: Tensor) -> Tensor:
        return torch.softmax((x * SCALE).masked_fill(later, -math.inf), dim=-1)

    who = (
        given("apex", lambda x, later: scaled_upper_triang_masked_softmax(x, None, SCALE)),
        given("torch", torch_s),
        compiled(torch_s),
    )
    # Half of what is read lies above the diagonal and is left out.
    return each_mode("causal_softmax", make, who, columns=(1.5, 2), shapes=SHAPES["causal"])


def _rotary() -> Iterator[Op]:
    def make(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
        [(length, batch, heads, channels)] = shapes
        channels = max(2, channels)  # a pair, for the host's cost
        powers = torch.arange(0, channels, 2, device=device) / channels
        angles = torch.arange(length, device=device)[:, None] / 10000**powers
        freqs = torch.cat([angles, angles], dim=-1)[:, None, None, :]
        return torch.randn(length, batch, heads, channels, device=device).to(dtype), freqs

    def torch_s(t: Tensor, freqs: Tensor) -> Tensor:
        freqs = freqs.detach()
        cos, sin = freqs.cos().to(t.dtype), freqs.sin().to(t.dtype)
        first, second = t.chunk(2, dim=-1)
        return t * cos + torch.cat([-second, first], dim=-1) * sin

    def liger_s(functions: Any, inputs: Inputs) -> Tensor:
        """Liger-Kernel rotates queries and keys, [batch, heads, sequence, channels]: one key."""
        t, freqs = inputs[0].permute(1, 2, 0, 3), inputs[1].detach()[:, 0].transpose(0, 1)
        query, _ = functions.liger_rope(t, t[:, :1], freqs.cos(), freqs.sin())
        turned: Tensor = query.permute(2, 0, 1, 3)
        return turned

    who = (
        given("apex", lambda t, freqs: fused_apply_rotary_pos_emb(t, freqs.detach())),
        given("torch", torch_s),
        compiled(torch_s),
        liger(liger_s),
    )
    return each_mode("rotary", make, who, columns=(2, 2), shapes=SHAPES["rotary"])


def _attention() -> Iterator[Op]:
    """Self-attention with a weight each for queries, keys, values and the result."""
    names = ("q_weight", "k_weight", "v_weight", "out_proj_weight")

    def make(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
        [shape] = shapes
        features = shape[2]
        weights = torch.randn(4, features, features, device=device).mul(features**-0.5)
        return torch.randn(shape, device=device).to(dtype), *weights.to(dtype)

    def heads(x: Tensor) -> int:
        return math.gcd(HEADS, x.shape[2])

    @functools.cache
    def module(features: int, count: int) -> torch.nn.Module:
        with torch.device("meta"):  # the weights are those that are passed
            return SelfMultiheadAttn(features, count, separate_qkv_params=True)

    def ours(x: Tensor, *weights: Tensor) -> Tensor:
        named = dict(zip(names, weights, strict=True))
        y: Tensor = torch.func.functional_call(module(x.shape[2], heads(x)), named, (x, x, x))[0]
        return y

    def torch_s(x: Tensor, *weights: Tensor) -> Tensor:
        query, key, value, out = weights
        return F.multi_head_attention_forward(
            x, x, x, x.shape[2], heads(x), None, None, None, None, False, 0.0, out, None,
            need_weights=False, use_separate_proj_weight=True,
            q_proj_weight=query, k_proj_weight=key, v_proj_weight=value,
        )[0]  # fmt: skip

    def written_out(x: Tensor, *weights: Tensor) -> Tensor:
        length, batch, features = x.shape
        query, key, value = (
            F.linear(x, w).view(length, batch * heads(x), -1).transpose(0, 1) for w in weights[:3]
        )
        scores = torch.softmax(query @ key.transpose(1, 2) * (features // heads(x)) ** -0.5, -1)
        y = (scores @ value).transpose(0, 1).reshape(length, batch, features)
        return F.linear(y, weights[3])

    who = (
        given("apex", ours),
        given("torch", torch_s),
        given("torch, written out", written_out),
        compiled(torch_s),
    )
    return each_mode("attention", make, who, columns=None, shapes=SHAPES["attention"])


# --- rows that an index picks -------------------------------------------------------------------


def _index_mul() -> Iterator[Op]:
    def make(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
        [(rows, columns)] = shapes
        picked = max(rows // 4, 1)
        return (
            torch.randn(picked, columns, device=device).to(dtype),
            torch.randn(rows, columns, device=device).to(dtype),
            torch.randint(picked, (rows,), device=device),
        )

    def torch_s(in1: Tensor, in2: Tensor, idx1: Tensor) -> Tensor:
        return in1[idx1] * in2

    who = (given("apex", index_mul_2d), given("torch", torch_s), compiled(torch_s))
    return each_mode("index_mul_2d", make, who, columns=(3, 5.25))


TRANSFORMER: tuple[Op, ...] = (
    *_dense(),
    *_mlp(),
    *_masked_softmax(),
    *_causal_softmax(),
    *_rotary(),
    *_attention(),
    *_index_mul(),
)
