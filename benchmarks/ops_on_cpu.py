"""What each operation takes on a CPU over the fastest expression of torch's with the same numbers.

Such an expression computes in float32 and rounds once, as ours does. One that rounds to 16 bits on
the way is listed with "less exact" and is no goal. Linear cross-entropy of 16 bits rounds its
logits, as a program of two functions does: float32 is "more exact" there, and no goal. All run in
turn in one process; timed is the CPU time of one thread. A ratio is the median of the ratios of
neighbouring runs, ours over theirs: below 1 ours is faster. "over" marks the rows above the rule:
1.10 of theirs and 6 us forward, 12 us with backward. The operations, their inputs and the
expressions are those of `apex.catalogue`.

    python -m benchmarks.ops_on_cpu [--seconds 0.3] [NAME ...]      # rotary layer_norm ...
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from apex.catalogue.entry import DTYPES, Function, Op, Shape
from apex.catalogue.ops import OPS
from apex.transformer.enums import AttnMaskType
from apex.transformer.functional import FusedScaleMaskSoftmax
from benchmarks.turns import ratio, take_turns, timed
from tools import quiet_without_reader

Tensor = torch.Tensor
OURS, LESS_EXACT, MORE_EXACT = "ours", "less exact", "more exact"
NO_GOALS = (LESS_EXACT, MORE_EXACT)

ROWS: list[Shape] = [(4, 64), (64, 256), (512, 512), (1024, 1024), (4096, 1024)]
IMAGES: list[Shape] = [(1, 32, 8, 8), (2, 64, 16, 16), (2, 128, 32, 32), (4, 256, 64, 64)]
SCORES = [(1, 16), (4, 32), (4, 64), (4, 128), (4, 256), (8, 512), (4, 1024)]  # heads, and a side
CLASSES: list[Shape] = [(8, 10), (128, 1000), (64, 32768), (256, 32768), (512, 32768)]
SIZES: dict[str, list[Shape]] = {
    "masked_softmax, no key": [(1, heads, side, side) for heads, side in SCORES],
    "causal_softmax": [(heads, side, side) for heads, side in SCORES],
    "rotary": [(16, 1, 2, 32), (64, 1, 4, 64), (128, 1, 8, 64), (256, 1, 8, 128),
               (1024, 1, 16, 128)],
    "layer_norm": ROWS,
    "rms_norm": ROWS,
    "group_norm": IMAGES,
    "group_norm, SiLU": IMAGES,
    "cross_entropy": CLASSES,
    "cross_entropy, smoothed": CLASSES,
    "linear_cross_entropy": [(64, 1000), (512, 8192), (2048, 16384)],
    "focal_loss": [(64, 80), (4096, 80), (40_000, 80)],
    "swiglu": [(1, 1_000), (100, 1_000), (1000, 4_000)],
    "index_mul_2d": [(256, 32), (4096, 64), (40_000, 64)],
    "attention": [(32, 4, 512), (128, 4, 512)],
    "dense_gelu_dense": [(4, 64), (64, 256)],
    "mlp": [(4, 64), (64, 256)],
}  # fmt: skip
LAYER = "layer with mask_func"


class Row(NamedTuple):
    """One operation at one size.

    Attributes:
        name: The operation, dtype and size.
        ours: Of ``inputs``.
        theirs: Expressions by name; `NO_GOALS` are none.
        inputs: The arguments.
        learned: How many of the first inputs get gradients.
    """

    name: str
    ours: Function
    theirs: dict[str, Function]
    inputs: tuple[Any, ...]
    learned: int


def _widened(function: Function, op: Op) -> Function:
    def wide(x: Tensor, *inputs: Any) -> Tensor:
        wider = [t.float() if _is_floating(t) else t for t in (x, *inputs)]
        y = function(*wider)
        return y if op.name.startswith(("cross_entropy", "linear", "focal")) else y.to(x.dtype)

    return wide


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _rows(op: Op) -> Iterator[Row]:
    named = {"torch": op.theirs}
    if op.name == "causal_softmax":  # a row of nan is 0 above the diagonal, too
        named = {"torch": lambda x, later: op.theirs(x, later).masked_fill(later, 0.0)}
    if op.timed and op.timed.written_out:
        named["written out"] = op.timed.written_out
    for short in ("fp32", "bf16"):
        for shape in SIZES[op.name]:
            for layout in {op.layout, torch.contiguous_format}:
                leaves, rest = dataclasses.replace(op, layout=layout).inputs(
                    shape, DTYPES[short], torch.device("cpu")
                )
                theirs = named
                if short != "fp32":
                    theirs = {f"{name}, widened": _widened(f, op) for name, f in named.items()}
                    theirs[LESS_EXACT] = op.theirs
                    if op.name == "linear_cross_entropy":
                        theirs = named | {MORE_EXACT: _widened(op.theirs, op)}
                last = ", channels last" if layout == torch.channels_last else ""
                name = f"{op.name} {short} {'x'.join(map(str, shape))}{last}"
                yield Row(name, op.ours, theirs, (*leaves, *rest), len(leaves))


def _layer() -> Iterator[Row]:
    def fill(x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(mask, -10000.0)

    def plain(x: Tensor, mask: Tensor) -> Tensor:
        z = fill(x * 0.5, mask)
        y = torch.softmax(z, -1)
        return y.masked_fill(z.amax(-1, keepdim=True) <= -10000.0, 0.0)

    for size in (64, 256, 512):
        layer = FusedScaleMaskSoftmax(False, False, AttnMaskType.padding, True, fill, True, 0.5)
        inputs = torch.randn(1, 4, size, size), torch.rand(1, 1, size, size) < 0.3
        yield Row(f"{LAYER} fp32 4x{size}x{size}", layer, {"plain": plain}, inputs, 1)


def _run(function: Callable[..., Tensor], inputs: tuple[Any, ...], dy: Any) -> None:
    y = function(*inputs)
    if dy is not None:
        wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.grad(y, wanted, dy)


def _times(
    functions: dict[str, Function], inputs: tuple[Any, ...], dy: Any, seconds: float
) -> dict[str, list[float]]:
    """Seconds of each run, run by run in turn."""
    runs = {name: partial(_run, function, inputs, dy) for name, function in functions.items()}
    once = {name: partial(timed, run) for name, run in runs.items()}
    *_, last = zip(*take_turns(once, 4).values(), strict=True)
    calls = max(1, int(2e-4 / sum(last) * len(runs)))
    turns = {name: partial(timed, run, calls) for name, run in runs.items()}
    return take_turns(turns, 7, seconds=seconds)


def main() -> None:
    """Print a line for each row, forward and with backward."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", choices=[*SIZES, LAYER, []], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each row and direction")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        f"{'':44}{'ours us':>10}  ratio [quartiles] of the best, and of what is less or more exact"
    )
    entries = {op.name: op for op in OPS}
    for name in options.names or [*SIZES, LAYER]:
        for row in _layer() if name == LAYER else _rows(entries[name]):
            for backward in (False, True):
                _print(row, backward, options.seconds)


def _print(row: Row, backward: bool, seconds: float) -> None:
    inputs = tuple(
        x.detach().requires_grad_(backward) if i < row.learned else x
        for i, x in enumerate(row.inputs)
    )
    y = row.ours(*inputs)
    dy = torch.ones_like(y) if backward else None
    with torch.set_grad_enabled(backward):
        times = _times({OURS: row.ours, **row.theirs}, inputs, dy, seconds)
    middle = {name: statistics.median(found) for name, found in times.items()}
    exact = [name for name in row.theirs if name not in NO_GOALS]
    best = min(exact, key=lambda name: middle[name])
    shown = [name for name in row.theirs if name in (best, *NO_GOALS)]
    texts = [f"{ratio(times[OURS], times[name])} {name}" for name in shown]
    over = middle[OURS] > middle[best] * 1.10 + (12e-6 if backward else 6e-6)
    direction = "both" if backward else "forward"
    print(
        f"{row.name:36} {direction:8}{middle[OURS] * 1e6:10.1f}  {'; '.join(texts)}"
        f"{'   over' if over else ''}",
        flush=True,
    )


if __name__ == "__main__":
    with quiet_without_reader():
        main()
