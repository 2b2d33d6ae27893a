"""What the host does for an operation on a GPU: forward and backward of tiny tensors.

A driver that computes nothing takes the place of Triton's: no GPU is needed, and what remains is
the time of the host. Four ways, which alternate in one process on one core:

* ours: the public function or module, and torch.autograd.grad;
* bare: an autograd.Function that calls the same launchers (``kernels/NAME.py``) and checks nothing;
* launchers: ``forward`` and ``backward`` of that file without autograd, which allocate and launch;
* raw: ``kernel[grid](...)`` with the arguments that the launchers passed.

Medians in us, the quartiles of ours, then the medians of the ratios of neighbouring turns with
their quartiles. What is timed is the CPU time of the thread. Goals: ours at most 1.5 of bare,
launchers at most 1.3 of raw. On a GPU a device guard comes on top, for ours and for bare alike.

    python benchmarks/launch_cost.py [--rounds 200] [WORD ...]   # operations with one of the words
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from apex import mlp
from apex.contrib.group_norm import GroupNorm
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.kernels import cross_entropy, group_norm, rotary, row_norms, swiglu
from apex.normalization import FusedLayerNorm
from apex.ops import _runtime
from apex.transformer.functional import fused_apply_rotary_pos_emb_cached

CALLS = 20  # of a turn
WARM_UP = 3  # turns that are not counted
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


def operations() -> Iterator[tuple[str, Operation]]:
    """All of them, in bfloat16 where that is usual."""
    half = torch.bfloat16

    def leaf(*shape: int, dtype: torch.dtype = half) -> torch.Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    norm = FusedLayerNorm(64, dtype=half)
    yield "layer norm", Operation(
        norm, row_norms, (leaf(4, 64), norm.weight, norm.bias), ((64,), 1e-5, True, half),
        "x weight bias shape eps centered dtype mean rstd",
        "x weight bias mean rstd shape eps centered dtype",
    )  # fmt: skip
    yield (
        "swiglu",
        Operation(mlp.swiglu, swiglu, (leaf(4, 64), leaf(4, 64)), (), "gate up", "gate up"),
    )
    labels = torch.tensor([1, 2, 3, 4])
    yield "cross-entropy", Operation(
        lambda logits: SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, -100),
        cross_entropy, (leaf(4, 64),), (labels, 0.1, -100),
        "logits labels smoothing padding_idx lse", "logits labels lse smoothing padding_idx",
    )  # fmt: skip
    angles = torch.rand(4, 1, 1, 64)
    cos, sin = angles.cos(), angles.sin()
    yield "rope", Operation(
        lambda t: fused_apply_rotary_pos_emb_cached(t, cos, sin), rotary, (leaf(4, 1, 2, 64),),
        (cos.flatten(0, 2), sin.flatten(0, 2), None, 0), "t cos sin positions dim",
        "cos sin positions dim",
    )  # fmt: skip
    images = torch.randn(1, 32, 4, 4).to(half, memory_format=torch.channels_last).requires_grad_()
    groups = GroupNorm(16, 32, act="silu", dtype=half)
    yield "group norm", Operation(
        groups, group_norm, (images, groups.weight, groups.bias), (16, 1e-5, True),
        "x weight bias groups eps silu stats", "x weight bias stats groups eps silu",
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
            known = (*args, *more)
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


def ways(operation: Operation) -> Ways:
    """What is timed."""
    tensors, rest, kernels = operation.tensors, operation.rest, operation.kernels
    leaves = [t for t in tensors if not isinstance(t, torch.nn.Parameter)]
    bare = bare_function(operation).apply
    plain = [t.detach() for t in tensors]
    with torch.no_grad():
        output = kernels.forward(*plain, *rest)
    y, *more = output if isinstance(output, tuple) else (output,)
    dy = torch.ones_like(y)
    known = dict(zip(operation.names.split(), (*plain, *rest, *more), strict=True))
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

    def raw() -> None:
        for each in launches:
            each()

    return {"ours": ours, "bare": by_hand, "launchers": launch, "raw": raw}


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
        "operation       ours  [quartiles]  bare  launchers   raw  ours/bare         launchers/raw"
    )
    for name, operation in operations():
        if args.words and not any(word in name for word in args.words):
            continue
        with _runtime.use("triton"):
            times = measure(ways(operation), args.rounds)
        ours, bare, launch, raw = (statistics.median(times[way]) for way in times)
        first, _, third = statistics.quantiles(times["ours"], n=4)
        print(
            f"{name:14} {ours:5.0f}  [{first:4.0f} {third:4.0f}] {bare:5.0f} {launch:10.0f} "
            f"{raw:5.0f}  {ratio(times['ours'], times['bare']):17} "
            f"{ratio(times['launchers'], times['raw'])}",
            flush=True,
        )


if __name__ == "__main__":
    main()
