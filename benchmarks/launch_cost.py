"""What the host does for an operation on a GPU: forward and backward of tiny tensors.

A driver that computes nothing takes the place of Triton's: no GPU is needed, and what remains is
the time of the host. Five ways, which alternate in one process on one core:

* ours: the public function or module, and torch.autograd.grad;
* bare: an autograd.Function that calls the same launchers (``kernels/NAME.py``) and checks nothing;
* launchers: ``forward`` and ``backward`` of that file without autograd, which allocate and launch;
* raw: ``kernel[grid](...)`` with the arguments that the launchers passed, and allocations: as many
  tensors by ``torch.empty`` as the launchers allocate;
* definition: the public function where no kernel runs. On a CPU: kernels for tiny tensors take the
  place of its launches.

Medians in us, then medians of the ratios of neighbouring turns with their quartiles. What is timed
is the CPU time of the thread. Goals: ours at most 1.5 of bare, launchers at most 1.3 of raw. On a
GPU a device guard comes on top, for ours and for bare alike.

The last columns are what apex/ops/_thresholds.py is derived from: the gap between ours and the
definition, of the fastest turn each; the bytes that the kernels save for an element, in 16 bits,
forward and backward; and from how many elements on an H100 (3.35 TB/s) takes longer to move them
than the gap. Bytes are counted, at 1024 x 1024: an operation reads its tensors and writes its
results once.

    python benchmarks/launch_cost.py [--rounds 200] [WORD ...]   # operations with one of the words
"""

import argparse
import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from apex import mlp
from apex.contrib.focal_loss import focal_loss as focal
from apex.contrib.group_norm import GroupNorm
from apex.contrib.index_mul_2d import index_mul_2d as rows_by_index
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.kernels import (
    cross_entropy,
    focal_loss,
    group_norm,
    index_mul_2d,
    rotary,
    row_norms,
    scaled_softmax,
    swiglu,
)
from apex.normalization import FusedLayerNorm
from apex.ops import _runtime
from apex.transformer.functional import fused_apply_rotary_pos_emb_cached
from apex.transformer.functional.fused_softmax import scaled_masked_softmax

CALLS = 20  # of a turn
WARM_UP = 3  # turns that are not counted
BYTES_OF_A_US = 3.35e6  # an H100's memory
Ways = dict[str, Callable[[], Any]]


class Launcher:
    """Stands for the C function that Triton builds for each kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        """Launch nothing."""


class Utils:
    """What Triton compares the limits of a kernel with."""

    @staticmethod
    def load_binary(*args: Any) -> tuple[int, ...]:
        """Return module, function, registers, spills and most threads."""
        return 1, 1, 32, 0, 1024

    @staticmethod
    def get_device_properties(device: Any) -> dict[str, int]:
        """Return those of an H100."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class Driver:
    """Triton's driver for an H100 that is not here."""

    launcher_cls = Launcher
    utils = Utils

    def get_current_target(self) -> GPUTarget:
        """Return what is compiled for."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return its number."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return its number."""
        return 0


class Operation(NamedTuple):
    """An operation: what a user calls, and its launchers.

    Attributes:
        public: From the tensors that require gradients to the result.
        kernels: The module of the launchers.
        tensors: Require gradients; the first arguments of ``forward``.
        rest: The other arguments of ``forward``.
        names: Of all arguments, then of what ``forward`` returns behind the result.
        saved: Of those, what ``backward`` takes.
    """

    public: Callable[..., torch.Tensor]
    kernels: Any
    tensors: Sequence[torch.Tensor]
    rest: tuple[Any, ...]
    names: str
    saved: str


def operations(rows: int = 4, columns: int = 64) -> Iterator[tuple[str, Operation]]:
    """All of them, in bfloat16, with tensors of rows and columns."""
    half = torch.bfloat16

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(half).requires_grad_()

    x, labels = leaf(rows, columns), torch.arange(rows) % 3
    norm = FusedLayerNorm(columns, dtype=half)
    yield "layer norm", Operation(
        norm, row_norms, (x, norm.weight, norm.bias), ((columns,), 1e-5, True, half),
        "x weight bias shape eps centered dtype mean rstd",
        "x weight bias mean rstd shape eps centered dtype",
    )  # fmt: skip
    yield (
        "swiglu",
        Operation(mlp.swiglu, swiglu, (x, leaf(rows, columns)), (), "gate up", "gate up"),
    )
    yield "cross-entropy", Operation(
        lambda logits: SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, -100),
        cross_entropy, (x,), (labels, 0.1, -100), "logits labels smoothing padding_idx lse",
        "logits labels lse smoothing padding_idx",
    )  # fmt: skip
    angles = torch.rand(rows, 1, 1, 64)
    cos, sin = angles.cos(), angles.sin()
    yield "rope", Operation(
        lambda t: fused_apply_rotary_pos_emb_cached(t, cos, sin), rotary,
        (leaf(rows, 1, columns // 64, 64),), (cos.flatten(0, 2), sin.flatten(0, 2), None, 0),
        "t cos sin positions dim", "cos sin positions dim",
    )  # fmt: skip
    images = torch.randn(rows // 4, 64, columns // 16, 1).to(half)
    images = images.to(memory_format=torch.channels_last).requires_grad_()
    groups = GroupNorm(16, 64, act="silu", dtype=half)
    yield "group norm", Operation(
        groups, group_norm, (images, groups.weight, groups.bias), (16, 1e-5, True),
        "x weight bias groups eps silu stats", "x weight bias stats groups eps silu",
    )  # fmt: skip
    mask = torch.zeros(1, 1, rows, columns, dtype=torch.bool)
    yield "softmax", Operation(
        lambda scores: scaled_masked_softmax(scores, mask, 0.5), scaled_softmax,
        (leaf(1, 16, rows, columns),), (mask, 0.5, False), "x mask scale causal y",
        "y scale causal",
    )  # fmt: skip
    one = torch.ones(1)
    yield "focal loss", Operation(
        lambda logits: focal(logits, labels, one, columns, 0.25, 2.0, 0.1), focal_loss, (x,),
        (labels, one, columns, 0.25, 2.0, 0.1),
        "logits targets num_positives classes alpha gamma smoothing",
        "logits targets num_positives classes alpha gamma smoothing",
    )  # fmt: skip
    few = leaf(3, columns)
    yield "index mul", Operation(
        lambda in2, in1: rows_by_index(in1, in2, labels), index_mul_2d, (x, few), (labels,),
        "in2 in1 index", "in2 in1 index",
    )  # fmt: skip


def bare_function(operation: Operation) -> Any:
    """An autograd function that calls the launchers and checks nothing."""
    kernels, count = operation.kernels, len(operation.tensors)
    names, saved = operation.names.split(), operation.saved.split()
    constants = {n: v for n, v in zip(names[count:], operation.rest, strict=False)
                 if not isinstance(v, torch.Tensor) and n in saved}  # fmt: skip
    kept = [names.index(name) for name in saved if name not in constants]
    words = [names[i] for i in kept]
    none = (None,) * len(operation.rest)

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            output = kernels.forward(*args)
            y, *more = output if isinstance(output, tuple) else (output,)
            known = (*args, *(more or [y]))
            ctx.save_for_backward(*[known[i] for i in kept])
            return y

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            tensors = dict(zip(words, ctx.saved_tensors, strict=True))
            needs = ctx.needs_input_grad[:count]
            return *kernels.backward(dy, needs, **tensors, **constants), *none

    return Bare


@contextlib.contextmanager
def recorded() -> Iterator[list[Callable[[], Any]]]:
    """Note what is launched in the block."""
    launches: list[Callable[[], Any]] = []
    original = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launches.append(lambda: kernel[grid](*args, **kwargs))
        return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


class Allocations(TorchDispatchMode):
    """Shapes and dtypes of the tensors that are allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a new tensor."""
        made = func(*args, **(kwargs or {}))
        if "empty" in func.name():
            self.made.append((made.shape, made.dtype))
        return made


class Bytes(TorchDispatchMode):
    """Bytes of what operations read and write; views move none."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count those of an operation."""
        made = func(*args, **(kwargs or {}))
        if not (func.is_view or "empty" in func.name()):
            leaves = tree_leaves((args, kwargs, made))
            tensors = {id(t): t for t in leaves if isinstance(t, torch.Tensor)}
            self.moved += sum(t.numel() * t.element_size() for t in tensors.values())
        return made


def bytes_of(operation: Operation, path: str) -> float:
    """Bytes for each element of the first tensor, forward and backward."""
    with _runtime.use(path), Bytes() as found:
        y = operation.public(*leaves_of(operation))
        torch.autograd.grad(y, operation.tensors, torch.ones_like(y))
    return found.moved / operation.tensors[0].numel()


def leaves_of(operation: Operation) -> list[torch.Tensor]:
    """What the public function is called with; parameters are in the module."""
    return [t for t in operation.tensors if not isinstance(t, torch.nn.Parameter)]


def ways(operation: Operation) -> Ways:
    """What is timed."""
    tensors, rest, kernels = operation.tensors, operation.rest, operation.kernels
    leaves = leaves_of(operation)
    bare = bare_function(operation).apply
    plain = [t.detach() for t in tensors]
    with torch.no_grad():
        output = kernels.forward(*plain, *rest)
    y, *more = output if isinstance(output, tuple) else (output,)
    dy = torch.ones_like(y)
    known = dict(zip(operation.names.split(), (*plain, *rest, *(more or [y])), strict=False))
    saved = {name: known[name] for name in operation.saved.split()}
    needs = [True] * len(tensors)

    def ours() -> Any:
        return torch.autograd.grad(operation.public(*leaves), tensors, dy)

    def by_hand() -> Any:
        return torch.autograd.grad(bare(*tensors, *rest), tensors, dy)

    def launch() -> Any:
        kernels.forward(*plain, *rest)
        return kernels.backward(dy, needs, **saved)

    with recorded() as launches:
        launch()
    with Allocations() as allocations:
        launch()

    def raw() -> None:
        for each in launches:
            each()

    def allocate() -> None:
        for shape, dtype in allocations.made:
            torch.empty(shape, dtype=dtype, device=dy.device)

    def defined() -> Any:
        with _runtime.use("reference"):
            return ours()

    return {
        "ours": ours, "bare": by_hand, "launchers": launch, "raw": raw, "allocations": allocate,
        "definition": defined,
    }  # fmt: skip


def measure(calls: Ways, rounds: int) -> dict[str, list[float]]:
    """Microseconds a call, turn by turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(WARM_UP + rounds):
        for name in names if turn % 2 else reversed(names):
            call, begin = calls[name], time.thread_time()
            for _ in range(CALLS):
                call()
            if turn >= WARM_UP:
                times[name].append((time.thread_time() - begin) / CALLS * 1e6)
    return times


def ratio(some: list[float], others: list[float]) -> str:
    """The median of the ratios and their quartiles, as text."""
    first, middle, third = statistics.quantiles(
        [a / b for a, b in zip(some, others, strict=True)], n=4
    )
    return f"{middle:.2f} [{first:.2f} {third:.2f}]"


def line(name: str, times: dict[str, list[float]], saved: float) -> str:
    """A row as text."""
    middle = {way: statistics.median(found) for way, found in times.items()}
    gap = min(times["ours"]) - min(times["definition"])  # other programs only add to them
    least = max(1.0, gap * BYTES_OF_A_US / saved)
    return (
        f"{name:13} {middle['ours']:5.0f} {middle['bare']:5.0f} {middle['launchers']:10.0f} "
        f"{middle['raw']:4.0f} + {middle['allocations']:3.0f} {middle['definition']:11.0f}  "
        f"{ratio(times['ours'], times['bare']):17} {ratio(times['launchers'], times['raw']):17} "
        f"{gap:6.0f} {saved:6.0f}  2**{math.log2(least):.1f}"
    )


def main() -> None:
    """Print a line for each operation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--rounds", type=int, default=200, help="turns of each way")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    driver.set_active(Driver())
    print(
        "operation      ours  bare  launchers  raw + all. definition  ours/bare         "
        "launchers/raw        gap  bytes  least"
    )
    for (name, tiny), (_, large) in zip(operations(), operations(1024, 1024), strict=True):
        if args.words and not any(word in name for word in args.words):
            continue
        saved = bytes_of(large, "reference") - bytes_of(large, "triton")
        with _runtime.use("triton"):
            times = measure(ways(tiny), args.rounds)
        print(line(name, times, saved), flush=True)


if __name__ == "__main__":
    main()
