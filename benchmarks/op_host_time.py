"""What the host does for an operation on a GPU, beside torch's own function: without a GPU.

Triton's own launcher runs over a driver that computes nothing (``stand_in.py``; without a C
compiler it says so and ends). Tensors are the CPU's, of a few rows. Four ways take turns in one
process on one core, forward and backward:

* ours: the public function, with kernels;
* jit: the same, but every launch goes through Triton's JIT;
* small: the public function below its threshold;
* torch: torch's function.

The last two compute on the CPU, next to nothing at these sizes: a launch of torch's on a GPU takes
the host longer. Medians in us of the CPU time of the thread, then medians of the ratios of
neighbouring turns with their quartiles; a last line times one launch of layer norm.

    python -m benchmarks.op_host_time [--rounds 100] [WORD ...]   # operations with one of the words
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from apex.catalogue.ops import OPS
from apex.ops import _runtime
from benchmarks import stand_in
from benchmarks.turns import one_core, ratio, take_turns, timed
from tools import quiet_without_reader

CALLS = 20  # of a turn
WARM_UP = 3  # turns that are not counted
Way = Callable[[], Any]


def ways(op: Any) -> dict[str, Way]:
    """Forward and backward of an operation, each way."""
    leaves, rest = op.inputs(op.of_matrix((4, 64)), torch.bfloat16, torch.device("cpu"))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    dy = torch.ones_like(op.ours(*leaves, *rest))

    def both(function: Any, path: str) -> Any:
        with _runtime.use(path):
            y = function(*leaves, *rest)
        return torch.autograd.grad(y, leaves, dy.to(y.dtype))

    def through_the_jit() -> Any:
        with _no_plans():
            return both(op.ours, "triton")

    return {
        "ours": functools.partial(both, op.ours, "triton"),
        "jit": through_the_jit,
        "small": functools.partial(both, op.ours, "reference"),
        "torch": functools.partial(both, op.theirs, "reference"),
    }


def _no_plans() -> Any:
    from apex.kernels._plans import Family

    def launch(family: Any, grid: Any, tensors: Any, numbers: Any, *varying: int) -> None:
        family.kernel[grid](*tensors, *numbers, *family.constants, **family.options)

    return mock.patch.object(Family, "launch", launch)


def measure(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Microseconds of a call, turn by turn."""
    timers = {name: functools.partial(timed, way, CALLS) for name, way in ways.items()}
    times = take_turns(timers, rounds, warm_up=WARM_UP)
    return {name: [1e6 * seconds for seconds in found] for name, found in times.items()}


def line(name: str, times: dict[str, list[float]]) -> str:
    """A row as text."""
    middle = " ".join(f"{statistics.median(found):6.0f}" for found in times.values())
    ratios = [ratio(times["ours"], times[way]) for way in ("jit", "torch")]
    return f"{name:28} {middle}   {ratios[0]!s:18} {ratios[1]!s}"


def one_launch() -> dict[str, Way]:
    """The forward kernel of layer norm, by its plan and through the JIT."""
    from apex.kernels import row_norms
    from apex.kernels._plans import Family

    x, weight = torch.ones(64, 1024), torch.ones(1024)
    calls: list[Any] = []
    original = Family.launch

    def launch(family: Any, *arguments: Any) -> None:
        calls.append((family, arguments))
        original(family, *arguments)

    with mock.patch.object(Family, "launch", launch):
        row_norms.forward(x, weight, weight, (1024,), 1e-5, True, x.dtype)
    ((family, arguments),) = calls
    grid, tensors, numbers, *_ = arguments
    values = (*tensors, *numbers, *family.constants)
    return {
        "plan": lambda: family.launch(*arguments),
        "jit": lambda: family.kernel[grid](*values, **family.options),
    }


def main() -> None:
    """Print a line for each operation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--rounds", type=int, default=100, help="turns of each way")
    args = parser.parse_args()
    one_core()
    stand_in.install()
    print(f"{'operation':28}   ours    jit  small  torch   ours/jit           ours/torch")
    for op in OPS:
        if op.operator and (not args.words or any(word in op.name for word in args.words)):
            print(line(op.name, measure(ways(op), args.rounds)), flush=True)
    times = measure(one_launch(), args.rounds)
    plan, jit = (statistics.median(times[name]) for name in ("plan", "jit"))
    print(f"a launch: {plan:.1f}, through the JIT {jit:.1f}; {ratio(times['plan'], times['jit'])}")


if __name__ == "__main__":
    with quiet_without_reader():
        main()
