"""Norms and losses: forward and every gradient, beside torch's own function in float64.

One rounding is allowed, or a few eps where sums of terms of both signs decide. In float32 twice
the error of torch's own float32 function is allowed too: sums over thousands of rows round at
every addition. (4 x 320 x 64 x 64, gradient of a group norm's weight: torch's is 10
eps off.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from apex.bench import tolerance
from apex.bench.selftest.check import (
    DTYPES,
    Check,
    Measured,
    Setting,
    random,
    same_again,
)
from apex.contrib.focal_loss import focal_loss
from apex.contrib.group_norm import GroupNorm
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.mlp import swiglu
from apex.normalization import fused_layer_norm as norms
from apex.transformer.functional import fused_apply_rotary_pos_emb, fused_softmax

__all__ = ["OPS", "Op", "checks"]

AREA = "norms and losses"
EPS = 1e-5
PADDING = 3  # the class of rows that do not count
SMOOTHING = 0.1
SCALE = 0.3

Shape = tuple[int, ...]
Inputs = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Op:
    """An operation.

    Attributes:
        name: For people.
        make: Makes the inputs of a shape; those that float get gradients.
        ours: Computes it.
        exact: Computes it from the same inputs in float64.
        shapes: Small ones, for every device.
        large: Those at which a GPU is busy.
        dtypes: Names of `DTYPES`.
        in_eps: Allowed errors in eps of the inputs' dtype times the result's rms, where sums of
            terms of both signs decide; else roundings are counted. By dtype of the inputs.
    """

    name: str
    make: Callable[[Shape, torch.dtype, Setting], Inputs]
    ours: Callable[..., torch.Tensor]
    exact: Callable[..., torch.Tensor]
    shapes: tuple[Shape, ...]
    large: tuple[Shape, ...]
    dtypes: tuple[str, ...] = tuple(DTYPES)
    in_eps: dict[torch.dtype, float] = field(default_factory=dict)


def checks() -> Iterator[Check]:
    """The checks of this module."""
    for op in OPS:
        for dtype in op.dtypes:
            for backward in (False, True):
                name = f"{op.name}, {dtype}, {'backward' if backward else 'forward'}"
                yield Check(AREA, name, _compared(op, DTYPES[dtype], backward))


def _compared(
    op: Op, dtype: torch.dtype, backward: bool
) -> Callable[[Setting], Iterator[Measured]]:
    def run(setting: Setting) -> Iterator[Measured]:
        for shape in (*op.shapes, *(op.large if setting.large else ())):
            inputs = op.make(shape, dtype, setting)
            found, again = (_results(op.ours, inputs, backward) for _ in range(2))
            exact = _results(op.exact, _cast(inputs, torch.float64), backward)
            torchs = _results(op.exact, _cast(inputs, torch.float32), backward)
            size = "x".join(map(str, shape))
            for name, one in found.items():
                three = (one, exact[name], torchs[name])
                yield _judged(f"{name}, {size}", *three, op.in_eps.get(dtype), dtype, setting)
            yield same_again(f"second call, {size}", [*found.values()], [*again.values()])

    return run


def _judged(
    what: str,
    found: torch.Tensor,
    exact: torch.Tensor,
    torchs: torch.Tensor,
    in_eps: float | None,
    dtype: torch.dtype,
    setting: Setting,
) -> Measured:
    def error(x: torch.Tensor) -> float:
        if in_eps is not None:
            return tolerance.errors_in_eps(x, exact, dtype)
        return tolerance.roundings(x, exact, truncated=setting.interpreted)

    if found.shape != exact.shape:
        return Measured(what, float("inf"), 0, "wrong shape")
    allowed = tolerance.ROUNDINGS[found.dtype] if in_eps is None else in_eps
    if found.dtype == torch.float32:
        allowed = max(allowed, 2 * error(torchs))
    return Measured(what, error(found), allowed, "roundings" if in_eps is None else "eps")


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return [x.to(dtype) if x.is_floating_point() else x for x in inputs]


def _results(
    function: Callable[..., torch.Tensor], inputs: Inputs, backward: bool
) -> dict[str, torch.Tensor]:
    """The output, or the gradients, by the names of the report."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    y = function(*leaves)
    if not backward:
        return {"output": y.detach()}
    asked = [x for x in leaves if x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    # Multiples of 1/8, which every dtype holds: the exact result starts from the same gradient.
    grad = torch.randint(-16, 17, y.shape, generator=generator).to(y) / 8
    names = ["input", "weight", "bias"]
    found = torch.autograd.grad(y, asked, grad)
    return {f"gradient of {name}": one for name, one in zip(names, found, strict=False)}


# --- inputs ---------------------------------------------------------------------------------------


def _rows(shape: Shape, dtype: torch.dtype, setting: Setting) -> Inputs:
    """Rows off 0, weights off 1 and biases."""
    columns = shape[-1:]
    return (
        random(shape, dtype, setting, scale=2.0, mean=0.5),
        random(columns, dtype, setting, seed=1, scale=0.2, mean=1.0),
        random(columns, dtype, setting, seed=2, scale=0.2),
    )


def _rows_of_float32_weights(shape: Shape, dtype: torch.dtype, setting: Setting) -> Inputs:
    x, weight, bias = _rows(shape, dtype, setting)
    return x, weight.float(), bias.float()


def _images(shape: Shape, dtype: torch.dtype, setting: Setting) -> Inputs:
    x = random(shape, dtype, setting, scale=2.0, mean=0.5)
    _, weight, bias = _rows((1, shape[1]), dtype, setting)
    return x.to(memory_format=torch.channels_last), weight, bias


def _gated(shape: Shape, dtype: torch.dtype, setting: Setting) -> Inputs:
    gate = random(shape, dtype, setting, scale=2.0)
    return gate, random(shape, dtype, setting, seed=1)


def _heads(shape: Shape, dtype: torch.dtype, setting: Setting) -> Inputs:
    return (random(shape, dtype, setting),)


def _logits(shape: Shape, dtype: torch.dtype, setting: Setting) -> Inputs:
    labels = torch.randint(shape[1], shape[:1], generator=torch.Generator().manual_seed(1))
    labels[1] = PADDING
    return random(shape, dtype, setting, scale=2.0), labels.to(setting.device)


def _before_logits(shape: Shape, dtype: torch.dtype, setting: Setting) -> Inputs:
    rows, features, classes = shape
    weight = random((classes, features), dtype, setting, seed=1, scale=features**-0.5)
    _, labels = _logits((rows, classes), dtype, setting)
    return random((rows, features), dtype, setting), weight, labels


def _anchors(shape: Shape, dtype: torch.dtype, setting: Setting) -> Inputs:
    """Targets from -2 on, and a column of padding."""
    targets = torch.arange(shape[0]) % shape[1] - 2
    return random(shape, dtype, setting, scale=2.0), targets.to(setting.device)


def _indexed(shape: Shape, dtype: torch.dtype, setting: Setting) -> Inputs:
    """About eight rows for each index."""
    rows = -(-shape[0] // 8)
    index = 7 * torch.arange(shape[0]) % rows
    in1 = random((rows, shape[1]), dtype, setting, seed=1)
    return in1, random(shape, dtype, setting), index.to(setting.device)


# --- operations -----------------------------------------------------------------------------------


def _layer_norm(thrifty: bool, mixed: bool = False) -> Callable[..., torch.Tensor]:
    function: Callable[..., torch.Tensor] = (
        norms.mixed_dtype_fused_layer_norm_affine if mixed else norms.fused_layer_norm_affine
    )
    return lambda x, weight, bias: function(x, weight, bias, weight.shape, EPS, thrifty)


def _rms_norm(thrifty: bool, mixed: bool = False) -> Callable[..., torch.Tensor]:
    function: Callable[..., torch.Tensor] = (
        norms.mixed_dtype_fused_rms_norm_affine if mixed else norms.fused_rms_norm_affine
    )
    return lambda x, weight: function(x, weight, weight.shape, EPS, thrifty)


def _torchs_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _torchs_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _fast_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    layer = FastLayerNorm(len(weight), EPS).to(x)
    y: torch.Tensor = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))
    return y


def _group_norm(act: str) -> Callable[..., torch.Tensor]:
    def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        layer = GroupNorm(16, len(weight), EPS, act=act).to(x)
        y: torch.Tensor = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))
        return y

    return ours


def _torchs_group_norm(act: str) -> Callable[..., torch.Tensor]:
    def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = F.group_norm(x, 16, weight, bias, EPS)
        return F.silu(y) if act else y

    return exact


def _cross_entropy(smoothing: float) -> Callable[..., torch.Tensor]:
    return lambda logits, labels: SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, PADDING)


def _torchs_cross_entropy(smoothing: float) -> Callable[..., torch.Tensor]:
    return lambda logits, labels: F.cross_entropy(
        logits, labels, reduction="none", label_smoothing=smoothing, ignore_index=PADDING
    )


def _linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return linear_cross_entropy(x, weight, labels, ignore_index=PADDING, chunk_size=len(x) // 3)


def _torchs_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight), labels, ignore_index=PADDING)


def _torchs_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _focal_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    one = torch.ones(1, device=logits.device)
    return focal_loss(logits, targets, one, logits.shape[1] - 1, 0.25, 2.0, SMOOTHING)


def _torchs_focal_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    x = logits[:, :-1]
    positive = targets[:, None] == torch.arange(x.shape[1], device=x.device)
    wanted = SMOOTHING / 2 + (1 - SMOOTHING) * positive.to(x)
    loss = F.binary_cross_entropy_with_logits(x, wanted, reduction="none")
    p = torch.sigmoid(x)
    loss = loss * torch.where(positive, 0.25 * (1 - p) ** 2, 0.75 * p**2)
    return loss[targets != -2].sum()


def _torchs_index_mul_2d(in1: torch.Tensor, in2: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return in1[index] * in2


def _freqs(t: torch.Tensor) -> torch.Tensor:
    """Float32 angles of three quarters of the channels, for each of the positions."""
    half = t.shape[-1] * 3 // 8
    speeds = 1e4 ** -torch.linspace(0, 1, half, device=t.device)
    angles = torch.arange(len(t), device=t.device)[:, None] * speeds
    return torch.cat([angles, angles], -1)[:, None, None]


def _rotary(t: torch.Tensor) -> torch.Tensor:
    return fused_apply_rotary_pos_emb(t, _freqs(t))


def _torchs_rotary(t: torch.Tensor) -> torch.Tensor:
    angles = _freqs(t).to(t.dtype)
    x, rest = t.tensor_split([angles.shape[-1]], -1)
    first, second = x.chunk(2, -1)
    y = x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    return torch.cat([y, rest], -1)


def _scores(shape: Shape, dtype: torch.dtype, setting: Setting) -> Inputs:
    """Scores of two heads, and the mask that they share, in which a query has no key."""
    rows, columns = shape
    mask = random((1, 1, rows, columns), torch.float32, setting, seed=1) > 0.5
    mask[..., -1, :] = True
    return random((1, 2, rows, columns), dtype, setting, scale=2.0), mask


def _causal_scores(shape: Shape, dtype: torch.dtype, setting: Setting) -> Inputs:
    return (random(shape, dtype, setting, scale=2.0),)


def _masked_softmax(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return fused_softmax.scaled_masked_softmax(x, mask, SCALE)


def _causal_softmax(x: torch.Tensor) -> torch.Tensor:
    return fused_softmax.scaled_upper_triang_masked_softmax(x, None, SCALE)


def _torchs_masked_softmax(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    y = torch.softmax((SCALE * x).masked_fill(mask, -10000.0), -1)
    return y.masked_fill(mask.all(-1, keepdim=True), 0.0)


def _torchs_causal_softmax(x: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones_like(x, dtype=torch.bool).triu(1)
    return torch.softmax((SCALE * x).masked_fill(hidden, -torch.inf), -1)


def _without(last: int, make: Callable[..., Inputs]) -> Callable[..., Inputs]:
    return lambda *args: make(*args)[:-last]


# A row that does not fill a block, one that does, and rows wider than a block.
ROWS: tuple[Shape, ...] = ((37, 300), (5, 1024))
MANY_ROWS: tuple[Shape, ...] = ((4096, 1024), (1027, 4096))
WIDE: tuple[Shape, ...] = ((2, 70_001),)
MANY_WIDE: tuple[Shape, ...] = ((64, 65_536),)
PICTURES: tuple[Shape, ...] = ((2, 64, 9, 7),)
MANY_PICTURES: tuple[Shape, ...] = ((4, 320, 64, 64),)
CLASSES: tuple[Shape, ...] = ((7, 123), (4, 4097))
MANY_CLASSES: tuple[Shape, ...] = ((512, 32_768), (4096, 1000))

OPS = (
    Op("layer norm", _rows, _layer_norm(False), _torchs_layer_norm, ROWS, MANY_ROWS),
    Op(
        "layer norm, wide rows", _rows, _layer_norm(False), _torchs_layer_norm, WIDE, MANY_WIDE,
        dtypes=("fp32",),
    ),
    Op(
        "layer norm, fp32 weights", _rows_of_float32_weights, _layer_norm(False, mixed=True),
        _torchs_layer_norm, ROWS, MANY_ROWS, dtypes=("bf16",),
    ),
    Op(
        "layer norm, memory-efficient", _rows, _layer_norm(True), _torchs_layer_norm, ROWS,
        MANY_ROWS, dtypes=("fp32",),
    ),
    Op(
        "fast layer norm", _rows, _fast_layer_norm, _torchs_layer_norm, ROWS, MANY_ROWS,
        dtypes=("fp16",),
    ),
    Op("RMS norm", _without(1, _rows), _rms_norm(False), _torchs_rms_norm, ROWS, MANY_ROWS),
    Op(
        "RMS norm, wide rows", _without(1, _rows), _rms_norm(False), _torchs_rms_norm, WIDE,
        MANY_WIDE, dtypes=("bf16",),
    ),
    Op(
        "RMS norm, memory-efficient", _without(1, _rows), _rms_norm(True), _torchs_rms_norm, ROWS,
        MANY_ROWS, dtypes=("fp32",),
    ),
    Op(
        "group norm", _images, _group_norm(""), _torchs_group_norm(""), PICTURES, MANY_PICTURES,
        in_eps={torch.float32: tolerance.GROUP_NORM},
    ),
    Op(
        "group norm with SiLU", _images, _group_norm("silu"), _torchs_group_norm("silu"), PICTURES,
        MANY_PICTURES, in_eps={torch.float32: tolerance.GROUP_NORM},
    ),
    Op(
        "cross-entropy", _logits, _cross_entropy(0.0), _torchs_cross_entropy(0.0), CLASSES,
        MANY_CLASSES,
    ),
    Op(
        "cross-entropy, smoothed", _logits, _cross_entropy(SMOOTHING),
        _torchs_cross_entropy(SMOOTHING), CLASSES, MANY_CLASSES, dtypes=("bf16",),
    ),
    Op(
        "linear cross-entropy", _before_logits, _linear_cross_entropy,
        _torchs_linear_cross_entropy, ((33, 24, 100),), ((1024, 256, 32_768),),
        in_eps=tolerance.PRODUCTS,
    ),
    Op("SwiGLU", _gated, swiglu, _torchs_swiglu, ROWS, MANY_ROWS),
    Op("focal loss", _anchors, _focal_loss, _torchs_focal_loss, ROWS, MANY_CLASSES),
    Op("index_mul_2d", _indexed, index_mul_2d, _torchs_index_mul_2d, ROWS, MANY_ROWS),
    Op(
        "rotary embedding", _heads, _rotary, _torchs_rotary, ((5, 2, 3, 16), (9, 1, 20, 128)),
        ((4096, 1, 32, 128),),
    ),
    Op(
        "masked softmax", _scores, _masked_softmax, _torchs_masked_softmax, CLASSES,
        MANY_ROWS, in_eps=tolerance.FROM_RESULT,
    ),
    Op(
        "causal softmax", _causal_scores, _causal_softmax, _torchs_causal_softmax, ((3, 33, 33),),
        ((8, 2048, 2048),), dtypes=("bf16",), in_eps=tolerance.FROM_RESULT,
    ),
)  # fmt: skip
