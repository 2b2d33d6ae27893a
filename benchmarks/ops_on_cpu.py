"""What each operation takes on a CPU over the fastest expression of torch's with the same numbers.

Such an expression computes in float32 and rounds once, as ours does. One that rounds to 16 bits on
the way is listed with "less exact" and is no goal. All run in turn in one process, on one thread; a
ratio is the median of the ratios of neighbouring runs, ours over theirs: below 1 ours is faster.
"over" marks the rows above the rule: 1.10 of theirs and 6 us forward, 12 us with backward.

    python benchmarks/ops_on_cpu.py [--seconds 0.3] [NAME ...]      # softmax rotary layer_norm ...
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine
from apex.ops.layers.swiglu import swiglu
from apex.ops.norms.group_norm import group_norm
from apex.transformer.enums import AttnMaskType
from apex.transformer.functional import FusedScaleMaskSoftmax, fused_apply_rotary_pos_emb
from apex.transformer.functional.fused_softmax import (
    scaled_masked_softmax,
    scaled_upper_triang_masked_softmax,
)

Tensor = torch.Tensor
F32, B16, H16 = torch.float32, torch.bfloat16, torch.float16
LESS_EXACT = "less exact"


class Row(NamedTuple):
    """One operation at one size.

    Attributes:
        name: The operation and its variant.
        ours: Of ``inputs``.
        theirs: Expressions by name; those that begin with `LESS_EXACT` are no goal.
        inputs: Tensors; the floating ones that are ``learned`` get gradients.
        learned: How many of the first inputs get gradients.
    """

    name: str
    ours: Callable[..., Tensor]
    theirs: dict[str, Callable[..., Tensor]]
    inputs: tuple[Tensor, ...]
    learned: int


def _normal(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def _masked(x: Tensor, mask: Tensor, scale: float = 0.5) -> Tensor:
    z = (x.float() * scale).masked_fill(mask, -10000.0)
    y = torch.softmax(z, -1)
    return y.masked_fill(z.amax(-1, keepdim=True) <= -10000.0, 0.0).to(x.dtype)


def _masked_16(x: Tensor, mask: Tensor, scale: float = 0.5) -> Tensor:
    return torch.softmax((x * scale).masked_fill(mask, -10000.0), -1)  # no rows of zeros


def _softmax() -> Iterator[Row]:
    for dtype in (F32, B16):
        for heads, size in ((1, 16), (4, 32), (4, 64), (4, 128), (4, 256), (8, 512), (4, 1024)):
            x = _normal(1, heads, size, size, dtype=dtype)
            mask = torch.rand(1, 1, size, size) < 0.3
            theirs = {"widened": _masked}
            if dtype != F32:
                theirs[LESS_EXACT] = _masked_16
            name = f"softmax masked {_short(dtype)} {heads}x{size}x{size}"
            yield Row(name, lambda x, m: scaled_masked_softmax(x, m, 0.5), theirs, (x, mask), 1)
            hidden = torch.ones(size, size, dtype=torch.bool).triu(1)

            def causal(x: Tensor, m: Tensor) -> Tensor:
                y = torch.softmax((x.float() * 0.5).masked_fill(m, -torch.inf), -1)
                return y.masked_fill(m, 0.0).to(x.dtype)  # a row of nan, too, is 0 there

            def causal_16(x: Tensor, m: Tensor) -> Tensor:
                return torch.softmax((x * 0.5).masked_fill(m, -torch.inf), -1)

            theirs = {"widened": causal}
            if dtype != F32:
                theirs[LESS_EXACT] = causal_16
            name, x = name.replace("masked", "causal"), x[0]
            yield Row(
                name,
                lambda x, m: scaled_upper_triang_masked_softmax(x, m, 0.5),
                theirs,
                (x, hidden),
                1,
            )


def _layer() -> Iterator[Row]:
    def fill(x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(mask, -10000.0)

    for size in (64, 256, 512):
        layer = FusedScaleMaskSoftmax(False, False, AttnMaskType.padding, True, fill, True, 0.5)
        x, mask = _normal(1, 4, size, size), torch.rand(1, 1, size, size) < 0.3
        name = f"layer with mask_func fp32 4x{size}x{size}"
        yield Row(name, layer, {"plain": _masked}, (x, mask), 1)


def _rotated(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def _rotary() -> Iterator[Row]:
    def plain(t: Tensor, freqs: Tensor) -> Tensor:
        t, to = t.float(), t.dtype
        return (t * freqs.cos() + _rotated(t) * freqs.sin()).to(to)

    def narrow(t: Tensor, freqs: Tensor) -> Tensor:
        return t * freqs.cos().to(t.dtype) + _rotated(t) * freqs.sin().to(t.dtype)

    for dtype in (F32, B16):
        for s, h, d in ((16, 2, 32), (64, 4, 64), (128, 8, 64), (256, 8, 128), (1024, 16, 128)):
            t, freqs = _normal(s, 1, h, d, dtype=dtype), torch.rand(s, 1, 1, d)
            theirs = {"plain": plain} if dtype == F32 else {"widened": plain, LESS_EXACT: narrow}
            name = f"rotary {_short(dtype)} {s}x1x{h}x{d}"
            yield Row(name, fused_apply_rotary_pos_emb, theirs, (t, freqs), 1)


def _norms() -> Iterator[Row]:
    def wide(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], w.float(), b.float()).to(x.dtype)

    def narrow(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w, b)

    def wide_rms(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], w.float(), 1e-6).to(x.dtype)

    def by_hand(x: Tensor, w: Tensor) -> Tensor:
        z = x.float()
        return (z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)

    def narrow_rms(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w, 1e-6)

    for dtype in (F32, B16):
        for rows, n in ((4, 64), (64, 256), (512, 512), (1024, 1024), (4096, 1024)):
            x, w, b = (_normal(*s, dtype=dtype) for s in ((rows, n), (n,), (n,)))
            theirs = {"torch": narrow} if dtype == F32 else {"widened": wide, LESS_EXACT: narrow}
            name = f"layer_norm {_short(dtype)} {rows}x{n}"
            yield Row(
                name, lambda x, w, b: fused_layer_norm_affine(x, w, b, x.shape[-1:]), theirs,
                (x, w, b), 3,
            )  # fmt: skip
            theirs = {"torch": wide_rms, "by hand": by_hand}
            if dtype != F32:
                theirs[LESS_EXACT] = narrow_rms
            name = name.replace("layer", "rms")
            yield Row(
                name, lambda x, w: fused_rms_norm_affine(x, w, x.shape[-1:], 1e-6), theirs,
                (x, w), 2,
            )  # fmt: skip


def _group_norm() -> Iterator[Row]:
    for dtype in (F32, B16):
        for images, channels, side in ((1, 32, 8), (2, 64, 16), (2, 128, 32), (4, 256, 64)):
            for last in (False, True):
                for act in ("", "silu"):
                    x = _normal(images, channels, side, side, dtype=dtype)
                    x = x.to(memory_format=torch.channels_last) if last else x

                    def wide(x: Tensor, w: Tensor, b: Tensor, act: str = act) -> Tensor:
                        y = F.group_norm(x.float(), 16, w.float(), b.float())
                        return (F.silu(y) if act else y).to(x.dtype)

                    def narrow(x: Tensor, w: Tensor, b: Tensor, act: str = act) -> Tensor:
                        y = F.group_norm(x, 16, w, b)
                        return F.silu(y) if act else y

                    theirs = {"torch": wide}
                    if dtype != F32:
                        theirs[LESS_EXACT] = narrow
                    w, b = (_normal(channels, dtype=dtype) for _ in range(2))
                    name = f"group_norm {_short(dtype)} {images}x{channels}x{side}x{side}"
                    name += f"{' last' if last else ''}{' silu' if act else ''}"
                    yield Row(
                        name, lambda x, w, b, act=act: group_norm(x, 16, w, b, act=act), theirs,
                        (x, w, b), 3,
                    )  # fmt: skip


def _cross_entropy() -> Iterator[Row]:
    def wide(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), labels, reduction="none", label_smoothing=0.1)

    def narrow(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x, labels, reduction="none", label_smoothing=0.1)

    for dtype in (F32, B16):
        for rows, classes in ((8, 10), (128, 1000), (64, 32768), (256, 32768), (512, 32768)):
            x, labels = _normal(rows, classes, dtype=dtype), torch.randint(1, classes, (rows,))
            theirs = {"torch": wide} if dtype == F32 else {"widened": wide, LESS_EXACT: narrow}
            name = f"cross_entropy {_short(dtype)} {rows}x{classes}"
            yield Row(
                name, lambda x, y: SoftmaxCrossEntropyLoss.apply(x, y, 0.1, 0), theirs,
                (x, labels), 1,
            )  # fmt: skip


def _linear_cross_entropy() -> Iterator[Row]:
    def plain(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), labels)

    def torchs(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return F.linear_cross_entropy(x, w, labels)

    for dtype in (F32, B16):
        for rows, features, classes in ((64, 64, 1000), (512, 128, 8192), (2048, 256, 16384)):
            x, w = _normal(rows, features, dtype=dtype), _normal(classes, features, dtype=dtype)
            theirs = {"plain": plain}
            if hasattr(F, "linear_cross_entropy"):
                theirs["F.linear_cross_entropy"] = torchs
            name = f"linear_cross_entropy {_short(dtype)} {rows}x{features}x{classes}"
            inputs = (x, w / 8, torch.randint(0, classes, (rows,)))
            yield Row(name, lambda x, w, y: linear_cross_entropy(x, w, y), theirs, inputs, 2)


def _elementwise() -> Iterator[Row]:
    def gated(a: Tensor, b: Tensor) -> Tensor:
        return (F.silu(a.float()) * b.float()).to(a.dtype)

    for dtype in (F32, B16):
        for n in (1_000, 100_000, 4_000_000):
            a, b = _normal(n, dtype=dtype), _normal(n, dtype=dtype)
            yield Row(f"swiglu {_short(dtype)} {n}", swiglu, {"plain": gated}, (a, b), 2)
        for rows, many, n in ((64, 256, 32), (1024, 4096, 64), (10_000, 40_000, 64)):
            a, b = _normal(rows, n, dtype=dtype), _normal(many, n, dtype=dtype)
            index = torch.randint(0, rows, (many,))

            def product(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
                return (F.embedding(index, a.float()) * b.float()).to(a.dtype)

            def product_16(a: Tensor, b: Tensor, index: Tensor) -> Tensor:
                return F.embedding(index, a) * b

            theirs = {"plain": product}
            if dtype != F32:
                theirs[LESS_EXACT] = product_16
            name = f"index_mul_2d {_short(dtype)} {rows}, {many}x{n}"
            yield Row(name, index_mul_2d, theirs, (a, b, index), 2)


ROWS = {
    "softmax": _softmax,
    "layer": _layer,
    "rotary": _rotary,
    "norm": _norms,
    "group_norm": _group_norm,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "elementwise": _elementwise,
}


def _short(dtype: torch.dtype) -> str:
    return {F32: "fp32", B16: "bf16", H16: "fp16"}[dtype]


def _run(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Any) -> None:
    y = function(*inputs)
    if dy is not None:
        torch.autograd.grad(y, [x for x in inputs if x.requires_grad], dy)


def _times(
    functions: list[Callable[..., Tensor]], inputs: tuple[Tensor, ...], dy: Any, seconds: float
) -> list[list[float]]:
    """Seconds of each run, run by run in turn."""
    for function in functions * 3:
        _run(function, inputs, dy)
    begin = time.perf_counter()
    for function in functions:
        _run(function, inputs, dy)
    calls = max(1, int(2e-4 / (time.perf_counter() - begin) * len(functions)))
    found: list[list[float]] = [[] for _ in functions]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[0]) < 7:
        for function, times in zip(functions, found, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                _run(function, inputs, dy)
            times.append((time.perf_counter() - start) / calls)
    return found


def main() -> None:
    """Print a line for each row, forward and with backward."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", choices=[*ROWS, []], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each row and direction")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'':44}{'ours us':>10}  ratio (quartiles) of the best, and of what is less exact")
    for name in options.names or ROWS:
        for row in ROWS[name]():
            for backward in (False, True):
                _print(row, backward, options.seconds)


def _print(row: Row, backward: bool, seconds: float) -> None:
    inputs = tuple(
        x.detach().requires_grad_(backward and i < row.learned) for i, x in enumerate(row.inputs)
    )
    y = row.ours(*inputs)
    dy = torch.ones_like(y) if backward else None
    with torch.set_grad_enabled(backward):
        ours, *theirs = _times([row.ours, *row.theirs.values()], inputs, dy, seconds)
    texts, over = [], False
    exact = [i for i, name in enumerate(row.theirs) if name != LESS_EXACT]
    best = min(exact, key=lambda i: statistics.median(theirs[i]))
    for i, name in enumerate(row.theirs):
        if i != best and i in exact:
            continue
        ratios = sorted(a / b for a, b in zip(ours, theirs[i], strict=True))
        low, middle, high = (ratios[len(ratios) * k // 4] for k in (1, 2, 3))
        texts.append(f"{middle:.2f} ({low:.2f}-{high:.2f}) {name}")
        if i == best:
            allowed = statistics.median(theirs[i]) * 1.10 + (12e-6 if backward else 6e-6)
            over = statistics.median(ours) > allowed
    direction = "both" if backward else "forward"
    print(
        f"{row.name:36} {direction:8}{statistics.median(ours) * 1e6:10.1f}  {'; '.join(texts)}"
        f"{'   over' if over else ''}",
        flush=True,
    )


if __name__ == "__main__":
    main()
