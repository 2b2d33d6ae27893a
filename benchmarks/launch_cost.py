"""What the host does for an operation on a GPU: forward and backward of tiny tensors, and steps.

Triton's own launcher runs, over a CUDA driver that computes nothing (``stand_in.py`` compiles one,
which takes a C compiler): no GPU is needed, and what remains is the time of the host. Of an
operation five ways alternate in one process on one core:

* ours: the public function or module, and torch.autograd.grad;
* bare: an autograd.Function that calls the same launchers (``kernels/NAME.py``) and checks nothing;
* launchers: ``forward`` and ``backward`` of that file without autograd, with the arguments of ours;
  they allocate and launch;
* JIT: ``kernel[grid](...)`` with the arguments that the launchers passed; plans: the same launches
  by their plans; and allocations: as many tensors by ``torch.empty`` as the launchers allocate. A
  launch by hand takes plans and allocations;
* definition: the public function where no kernel runs. On a CPU: kernels for tiny tensors take the
  place of its launches.

Medians in us, then medians of the ratios of neighbouring turns with their quartiles. What is timed
is the CPU time of the thread. Goals: ours at most 1.5 of bare, launchers at most 1.3 of a launch by
hand. On a GPU a device guard comes on top, for ours and for bare alike.

The last columns are the gap between ours and the definition, of the fastest turn each; the bytes
that the kernels save for an element, in 16 bits, forward and backward; and from how many elements
on an H100 (3.35 TB/s) takes longer to move them than the gap. Bytes are counted, at 1024 x 1024: an
operation reads its tensors and writes its results once.

Of an optimizer a step of 148 and of 300 tensors of 4 x 4 beside torch's fused one (AdamW's for
those that torch does not have), with gradients that are new objects at each step. On the CPU
torch's computes as well, 16 elements a tensor: the same rows of a GPU had ratios of 0.69 where this
one has 0.9, and 1.86 where it has 2.1. Beside the times: Python frames and launches of a step, and
passes over the list, see ``tests/passes.py``.

    python -m benchmarks.launch_cost [--rounds 200] [WORD ...]  # in names of operations, optimizers
"""

import argparse
import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from apex.catalogue.ops import OPS
from apex.catalogue.optimizers import beside_torch
from apex.kernels._plans import Family
from apex.ops import _runtime
from benchmarks import stand_in
from benchmarks.turns import one_core, ratio, take_turns, timed
from tests import passes
from tools import quiet_without_reader

CALLS = 20  # of a turn
WARM_UP = 3  # turns that are not counted
BYTES_OF_A_US = 3.35e6  # an H100's memory
Ways = dict[str, Callable[[], Any]]


class Operation(NamedTuple):
    """An operation: what a user calls, its tensors that require gradients, and its launchers."""

    public: Callable[..., torch.Tensor]
    tensors: Sequence[torch.Tensor]
    kernels: Any


def operations(rows: int, columns: int) -> Iterator[tuple[str, Operation]]:
    """Those of the catalogue, in bfloat16, with tensors of rows and columns."""
    for op in OPS:
        if op.operator and not op.operator.own_backward:  # else it is never the definition
            shape = op.of_matrix((rows, columns))
            leaves, rest = op.inputs(shape, torch.bfloat16, torch.device("cpu"))
            leaves = [leaf.requires_grad_() for leaf in leaves]
            call = functools.partial(_called, op.ours, rest)
            yield op.name, Operation(call, leaves, op.operator.implementation(leaves[0]))


def _called(function: Any, rest: Sequence[Any], *leaves: torch.Tensor) -> Any:
    return function(*leaves, *rest)


def launchers(operation: Operation, dy: torch.Tensor) -> tuple[Any, Any]:
    """``forward`` and ``backward``, each with the arguments that the public function passes."""
    calls: dict[str, Any] = {}

    def noted(way: str) -> Callable[..., Any]:
        function = getattr(operation.kernels, way)

        def call(*args: Any, **more: Any) -> Any:
            calls.setdefault(way, (function, args, more))  # a backward may call forward
            return function(*args, **more)

        return call

    with (
        mock.patch.object(operation.kernels, "forward", noted("forward")),
        mock.patch.object(operation.kernels, "backward", noted("backward")),
    ):
        y = operation.public(*operation.tensors)
        torch.autograd.grad(y, operation.tensors, dy)
    return calls["forward"], calls["backward"]


def bare_function(forward: Any, backward: Any) -> Any:
    """An autograd function that calls the launchers and checks nothing."""
    (compute, args, _), (differentiate, (_, needs), known) = forward, backward
    saved = {name: x for name, x in known.items() if isinstance(x, torch.Tensor)}
    others = {name: x for name, x in known.items() if name not in saved}
    none = (None,) * (len(args) - len(needs))

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            output = compute(*args)
            ctx.save_for_backward(*saved.values())  # as many as there would be
            return output[0] if isinstance(output, tuple) else output

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            tensors = dict(zip(saved, ctx.saved_tensors, strict=True))
            return *differentiate(
                dy, ctx.needs_input_grad[: len(needs)], **tensors, **others
            ), *none

    return Bare


class Launch(NamedTuple):
    """A launch that was noted, to be repeated: through Triton's JIT, and as it was."""

    by_the_jit: Callable[[], Any]
    again: Callable[[], Any]


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Note what is launched in the block, by plans of launches (`Family`) and without."""
    launches: list[Launch] = []
    run, flat, lists = JITFunction.run, Family.launch, Family.launch_lists

    def note(again: Callable[[], Any], kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(Launch(functools.partial(kernel[grid], *args, **kwargs), again))
        with mock.patch.object(JITFunction, "run", run):  # which the first launch of a plan calls
            return again()

    def of_jit(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        again = functools.partial(run, kernel, *args, grid=grid, warmup=warmup, **kwargs)
        return note(again, kernel, grid, *args, **kwargs)

    def of_plan(family: Family, grid: Any, tensors: Any, numbers: Any, *varying: int) -> None:
        again = functools.partial(flat, family, grid, tensors, numbers, *varying)
        args = (*tensors, *numbers, *family.constants)
        note(again, family.kernel, grid, *args, **family.options)

    def of_lists(family: Family, grid: Any, arguments: Any) -> None:
        again = functools.partial(lists, family, grid, arguments)
        note(again, family.kernel, grid, *arguments, *family.constants, **family.options)

    with (
        mock.patch.object(JITFunction, "run", of_jit),
        mock.patch.object(Family, "launch", of_plan),
        mock.patch.object(Family, "launch_lists", of_lists),
    ):
        yield launches


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
        y = operation.public(*operation.tensors)
        torch.autograd.grad(y, operation.tensors, torch.ones_like(y))
    return found.moved / operation.tensors[0].numel()


def ways(operation: Operation) -> Ways:
    """What is timed."""
    tensors = operation.tensors
    dy = torch.ones_like(operation.public(*tensors))

    def ours() -> Any:
        return torch.autograd.grad(operation.public(*tensors), tensors, dy)

    forward, backward = launchers(operation, dy)
    (compute, args, _), (differentiate, (slope, needs), known) = forward, backward
    bare = bare_function(forward, backward).apply
    inputs = [None if x is None else x.detach().requires_grad_() for x in args[: len(needs)]]
    wanted = [x for x in inputs if x is not None]
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    known = {k: x.detach() if isinstance(x, torch.Tensor) else x for k, x in known.items()}

    def by_hand() -> Any:
        return torch.autograd.grad(bare(*inputs, *args[len(needs) :]), wanted, slope)

    def launch() -> Any:
        compute(*plain)
        return differentiate(slope, needs, **known)

    with recorded() as launches:
        launch()
    with Allocations() as allocations:
        launch()

    jit, plans = ([one[way] for one in launches] for way in range(2))

    def allocate() -> None:
        for shape, dtype in allocations.made:
            torch.empty(shape, dtype=dtype, device=dy.device)

    def defined() -> Any:
        with _runtime.use("reference"):
            return ours()

    return {
        "ours": ours, "bare": by_hand, "launchers": launch,
        "JIT": functools.partial(_all, jit), "plans": functools.partial(_all, plans),
        "allocations": allocate, "definition": defined,
    }  # fmt: skip


def _all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def measure(calls: Ways, rounds: int) -> dict[str, list[float]]:
    """Microseconds a call, turn by turn."""
    timers = {name: functools.partial(timed, call, CALLS) for name, call in calls.items()}
    times = take_turns(timers, rounds, warm_up=WARM_UP)
    return {name: [1e6 * seconds for seconds in found] for name, found in times.items()}


def line(name: str, times: dict[str, list[float]], saved: float) -> str:
    """A row as text."""
    middle = {way: statistics.median(found) for way, found in times.items()}
    by_hand = [sum(both) for both in zip(times["plans"], times["allocations"], strict=True)]
    gap = min(times["ours"]) - min(times["definition"])  # other programs only add to them
    least = max(1.0, gap * BYTES_OF_A_US / saved)
    return (
        f"{name:28} {middle['ours']:5.0f} {middle['bare']:5.0f} {middle['launchers']:10.0f} "
        f"{middle['JIT']:4.0f} {middle['plans']:4.0f} + {middle['allocations']:3.0f} "
        f"{middle['definition']:11.0f}  {ratio(times['ours'], times['bare'])!s:17} "
        f"{ratio(times['plans'], times['JIT'])!s:17} "
        f"{ratio(times['launchers'], by_hand)!s:22} "
        f"{gap:6.0f} {saved:6.0f}  2**{math.log2(least):.1f}"
    )


# -- steps -----------------------------------------------------------------------------------------

TENSORS = (148, 300)  # of BERT-base without embeddings, and twice that
STEPS = 5  # of a turn
OPTIMIZERS = beside_torch()


class Training(NamedTuple):
    """An optimizer, and what gives its parameters gradients that are new objects."""

    step: Callable[[], Any]
    give: Callable[[], None]

    def seconds(self) -> float:
        """Seconds of a step, without what gives it gradients."""
        found = []
        for _ in range(STEPS):
            self.give()
            found.append(timed(self.step))
        return sum(found) / STEPS


def training(make: Callable[..., Any], count: int) -> Training:
    """A training of tiny tensors."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4, 4, generator=generator)) for _ in range(count)]
    memory = [torch.randn(4, 4, generator=generator) for _ in params]

    def give() -> None:
        for param, grad in zip(params, memory, strict=True):
            param.grad = grad.detach()  # in the memory of the last one, as by torch's allocator

    return Training(make(params).step, give)


def step_line(name: str, count: int, rounds: int, launched: Callable[[], int]) -> str:
    """A row of an optimizer as text."""
    ours, theirs = (training(make, count) for make in OPTIMIZERS[name][::2])
    times = take_turns({"ours": ours.seconds, "torch": theirs.seconds}, rounds, warm_up=WARM_UP)
    us = {way: 1e6 * statistics.median(found) for way, found in times.items()}
    ours.give()
    before = launched()
    frames = len(passes.frames(ours.step))
    launches = launched() - before
    ours.give()
    with passes.counted(("apex.optimizers", "apex.ops", "apex.kernels"), count) as found:
        ours.step()
    return (
        f"{name:14} {count:4} {us['ours']:7.0f} {us['torch']:7.0f}  "
        f"{ratio(times['ours'], times['torch'])!s:17} {len(found):6} {frames:6} {launches:8}"
    )


def print_steps(words: Sequence[str], rounds: int, launched: Callable[[], int]) -> None:
    """Print a line for each optimizer."""
    print("\noptimizer   tensors    ours   torch  ours/torch        passes frames launches")
    for name in OPTIMIZERS:
        if not words or any(word in name for word in words):
            for count in TENSORS:
                with _runtime.use("triton"):
                    print(step_line(name, count, rounds, launched), flush=True)


def main() -> None:
    """Print a line for each operation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--rounds", type=int, default=200, help="turns of each way")
    args = parser.parse_args()
    one_core()
    library = stand_in.install()
    print(
        f"{'operation':28}  ours  bare  launchers  JIT plans + all. definition  ours/bare         "
        "plans/JIT         launchers/(plans + all.)  gap  bytes  least"
    )
    with _runtime.use("triton"):
        sizes = list(zip(operations(4, 64), operations(1024, 1024), strict=True))
    for (name, tiny), (_, large) in sizes:
        if args.words and not any(word in name for word in args.words):
            continue
        saved = bytes_of(large, "reference") - bytes_of(large, "triton")
        with _runtime.use("triton"):
            times = measure(ways(tiny), args.rounds)
        print(line(name, times, saved), flush=True)
    print_steps(args.words, args.rounds, library.stand_in_launches)


if __name__ == "__main__":
    with quiet_without_reader():
        main()
