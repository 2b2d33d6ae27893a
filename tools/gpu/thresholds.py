"""From how many elements on kernels pay: measures both numbers of every operation, and writes them.

Each operation runs forward and backward in bfloat16, by its kernels and by its definition, at sizes
that double. For the GPU's time the calls are queued behind a pause of the GPU, so that it never
waits for the host. For wall time each call is waited for. A number is the smallest size from which
on the kernels are not slower at any larger one.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch

from apex.catalogue.entry import Op
from apex.catalogue.ops import OPS
from apex.ops import _runtime, _thresholds
from benchmarks.turns import take_turns
from tools.gpu import checking
from tools.gpu.checking import BF16, DEVICE, check
from tools.gpu.rows import save

COLUMNS = 1024
TURNS = 3
PATHS = ("triton", "reference")
Times = dict[str, list[float]]


def timed_operations() -> dict[str, Op]:
    """An entry of the catalogue for each row of the table."""
    found: dict[str, Op] = {}
    for op in OPS:
        if op.operator and _thresholds.threshold(op.operator.name):
            found.setdefault(op.operator.name, op)
    return found


def load_table() -> dict[str, dict[str, Any]]:
    """The rows that are there."""
    table: dict[str, dict[str, Any]] = json.loads(_thresholds.FILE.read_text("utf-8"))
    return table


def crossing(sizes: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> int:
    """The smallest size from which on ours is never slower; twice the largest if there is none."""
    least = 2 * sizes[-1]
    for size, mine, other in reversed(list(zip(sizes, ours, theirs, strict=True))):
        if mine > other:
            return least
        least = size
    return 1  # everywhere


def _both_ways(op: Op, rows: int, path: str) -> tuple[Callable[[], Any], int]:
    shape = op.of_matrix((rows, COLUMNS))
    leaves, rest = op.inputs(shape, BF16, DEVICE)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    with _runtime.use(path):
        upstream = torch.ones_like(op.ours(*leaves, *rest))

    def work() -> Any:
        with _runtime.use(path):
            return torch.autograd.grad(op.ours(*leaves, *rest), leaves, upstream)

    for _ in range(3):
        work()
    return work, leaves[0].numel()


CLOCKS = {"gpu": checking.gpu_ms, "wall": checking.wall_ms}


def measure(op: Op) -> dict[str, int]:
    """Both numbers of an operation."""
    counts = range(4, 6) if checking.DRY else [2**k for k in range(2, 17)]  # to 2**26 elements
    paths = PATHS[1:] * 2 if checking.DRY else PATHS  # no kernel runs on a CPU
    sizes: list[int] = []
    found: dict[str, tuple[list[float], list[float]]] = {clock: ([], []) for clock in CLOCKS}
    for rows in counts:
        (ours, size), (theirs, _) = (_both_ways(op, rows, path) for path in paths)
        sizes.append(size)
        for clock, read in CLOCKS.items():
            ways = {"ours": partial(read, ours), "theirs": partial(read, theirs)}
            times = take_turns(ways, 1 if checking.DRY else TURNS)
            for name, column in zip(ways, found[clock], strict=True):
                column.append(statistics.median(times[name]))
    return {clock: crossing(sizes, *columns) for clock, columns in found.items()}


def row(numbers: dict[str, int], card: str, triton: str) -> dict[str, Any]:
    """What the table says about an operation."""
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    wall = max(numbers["gpu"], numbers["wall"])
    return {
        "gpu": numbers["gpu"], "wall": wall, "card": card,
        "torch": torch.__version__.split("+")[0], "triton": triton, "date": today, "derived": None,
    }  # fmt: skip


@check()
def thresholds() -> str:
    """Measure all and write the table; what a run does not finish keeps its row."""
    import triton

    table = load_table()
    said = []
    for name, op in timed_operations().items():
        numbers = measure(op)
        said.append(f"{name}: gpu {numbers['gpu']:,}, wall {numbers['wall']:,}")
        if not checking.DRY:
            table[name] = row(numbers, torch.cuda.get_device_name(), triton.__version__)
            save(table, _thresholds.FILE)
    return "; ".join(said)
