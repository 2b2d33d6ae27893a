"""Cases of a kernel file that lists none in ``cases/``: from the catalogue's entry of its name.

They are enough for an update that one launch runs, and for an op whose tensors all have the shape
of its result. What else a kernel takes, and why an access is narrow, is said in a file of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from apex.catalogue.entry import Op
from apex.catalogue.ops import OPS
from apex.catalogue.optimizers import OPTIMIZERS
from apex.ops import _runtime
from apex.ops.lists.multi_tensor import Update
from tools.kernels.case import DTYPES, CompiledCase, launched
from tools.kernels.list_case import optimizer_cases

ROWS = 4099


def cases(name: str) -> Iterator[CompiledCase]:
    """Yield the cases of a kernel file; none where the catalogue has nothing of that name."""
    if importlib.util.find_spec(f"apex.ops.updates.{name}"):
        yield from _of_updates(importlib.import_module(f"apex.ops.updates.{name}"))
    for op in OPS:
        if op.operator and op.operator._kernel_file == f"apex.kernels.{name}":
            yield from _of_op(op, name)


def _of_updates(module: Any) -> Iterator[CompiledCase]:
    made: list[Any] = [one.make for one in OPTIMIZERS if hasattr(one.make, "_algorithm")]
    (kind,) = {one for one in made if one._algorithm.__module__ == module.__name__}
    for update in vars(module).values():
        if isinstance(update, Update):
            file, _, function = update.kernel.partition(":")
            kernel = getattr(importlib.import_module(f"apex.kernels.{file}"), function)
            yield from optimizer_cases(
                kernel, len(kind.slots), " ".join(update.scalars._fields),
                narrow_states=bool(kind.narrow_slots),
            )  # fmt: skip


def _of_op(op: Op, name: str) -> Iterator[CompiledCase]:
    """Columns that are a multiple of 16 and others, whole blocks and others."""
    assert op.operator is not None
    writes = ("y_ptr", *(f"d{tensor}_ptr" for tensor in op.operator.grads))
    for kind, columns in (("fp16", 1001), ("bf16", 1001), ("fp32", 1001), ("bf16", 1024)):
        call = both_ways(op, op.of_matrix((ROWS, columns)), DTYPES[kind])
        yield from launched(call, name, f"{kind} {columns}", writes=writes, tail=True)


def both_ways(op: Op, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], None]:
    """Make a function that computes an op's operator and its backward, on tensors of `meta`."""
    leaves = [
        torch.empty(tuple(leaf.shape), dtype=leaf.dtype or dtype, device="meta")
        for leaf in op.leaves(shape)
    ]
    leaves[0] = leaves[0].contiguous(memory_format=op.layout)
    args, of = op.arguments(*leaves, *op.rest(leaves[0])), op.operator
    assert of is not None

    def run() -> None:
        with _runtime.use("triton"):
            found = of.run(*args)
            results = found if isinstance(found, tuple) else (found,)
            known = dict(zip([*of.names, *of.results], [*args, *results], strict=True))
            needs, saved = [True] * len(of.grads), map(known.get, of._saved)
            of._run_backward(torch.empty_like(results[0]), needs, *saved)

    return run
