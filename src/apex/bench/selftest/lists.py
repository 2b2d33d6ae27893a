"""Lists of tensors: scaling, sums, norms and flags beside float64, and twice with the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from apex.bench import tolerance
from apex.bench.catalogue.entry import DTYPES, random
from apex.bench.catalogue.lists import LISTS, ListOp
from apex.bench.selftest.check import Check, Measured, Setting, one_rounding, same

__all__ = ["checks", "tensors"]

AREA = "lists of tensors"
SHAPES = ((), (1,), (0,), (7,), (33, 5), (1025,), (8193,))  # 8193: one more than a block
LARGE = ((1_000_003,), (3000, 1000))


def tensors(
    setting: Setting, dtype: torch.dtype, seed: int, shapes: Sequence[tuple[int, ...]] = ()
) -> list[torch.Tensor]:
    """A list of awkward sizes, and of large tensors on a GPU."""
    every = shapes or (*SHAPES, *(LARGE if setting.large else ()))
    return [random(s, dtype, setting.device, seed=100 * seed + n) for n, s in enumerate(every)]


def checks() -> Iterator[Check]:
    """The checks of this module."""
    for op in LISTS:
        for dtype in op.dtypes:
            yield Check(AREA, f"{op.name}, {dtype}", partial(_compared, op, DTYPES[dtype]))


def _compared(op: ListOp, dtype: torch.dtype, setting: Setting) -> Iterator[Measured]:
    lists = [tensors(setting, dtype, seed) for seed in range(op.lists)]
    flag = torch.zeros(1, dtype=torch.int32, device=setting.device)
    found, again = (op.ours(flag, *lists) for _ in range(2))
    exact = op.exact(*([x.double() for x in column] for column in lists))
    yield from one_rounding("output", zip(found.rounded, exact.rounded, strict=True), setting)
    for norm, wanted in zip(found.norms, exact.norms, strict=True):
        # Few numbers, each off by the additions of a sum.
        error = tolerance.errors_in_eps(norm, wanted) if norm.shape == wanted.shape else torch.inf
        yield Measured("norm", error, tolerance.NORM, "eps")
    yield same("second call", [*found.rounded, *found.norms], [*again.rounded, *again.norms])
    yield Measured("flag, 0 expected", int(flag), 0, "off")
    for bad in (torch.inf, torch.nan) if op.flags else ():
        lists[-1][-1].view(-1)[-1] = bad
        flag.zero_()
        op.ours(flag, *lists)
        yield Measured("flag, 1 expected", 1 - int(flag), 0, "off")
