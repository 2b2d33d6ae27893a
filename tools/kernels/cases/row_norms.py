"""What is inspected of :mod:`apex.kernels.row_norms`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from apex.kernels.row_norms import (
    WIDEST_BACKWARD,
    WIDEST_FORWARD_BYTES,
    WIDEST_FROM_OUTPUT,
    backward,
    forward,
)
from tools.kernels.case import BITS, DTYPES, CompiledCase, launched, meta


def cases() -> Iterator[CompiledCase]:
    """What is inspected: types of x, weight and y."""
    same = [(kind, kind, kind) for kind in ("fp32", "fp16", "bf16")]
    for centered in (True, False):
        for types in [*same, ("fp32", "bf16", "bf16"), ("fp32", "fp16", "fp16")]:
            yield from _cases(*types, centered, True)
            if types in same:
                yield from _cases(*types, centered, False)
    yield from _cases("bf16", "bf16", "bf16", True, True, (1, 1001, 32801))


def _cases(
    kind: str, of_weight: str, of_y: str, centered: bool, affine: bool, odd: Sequence[int] = ()
) -> Iterator[CompiledCase]:
    """Several rows in a tile, the longest row in a tile, and a longer one; or ``odd`` lengths."""
    name = "layer_norm" if centered else "rms_norm"
    words = f"{kind} {of_weight} {of_y}" if affine else f"{kind} plain"
    narrow = dict.fromkeys(("mean_ptr", "rstd_ptr"), "one number a row")
    more: dict[str, Any] = {
        "prefix": "row_norm", "writes": ("y_ptr", "dx_ptr", "dweight_ptr", "dbias_ptr"),
        "shared": ("weight_ptr", "bias_ptr", "dweight_ptr", "dbias_ptr"), "aligned": not odd,
    }  # fmt: skip

    def rows(kind: str, columns: int) -> tuple[torch.Tensor, Any, Any]:
        weight = meta(of_weight, columns) if affine else None
        return meta(kind, 4100, columns), weight, weight if centered else None

    widest = WIDEST_FORWARD_BYTES * 8 // BITS[kind]
    for columns in odd or (1000, widest, 2 * widest):
        call: Any = partial(forward, *rows(kind, columns), (columns,), 1e-5, centered, DTYPES[of_y])
        yield from launched(call, name, f"{columns} {words}", narrow=narrow, **more)
    rstd = meta("fp32", 4100)
    for widest, by_y in ((WIDEST_BACKWARD, False), (WIDEST_FROM_OUTPUT, True))[
        : 1 + (affine and not odd)
    ]:
        for columns in odd or (1000, widest, 2 * widest):
            saved, weight, bias = rows(of_y if by_y else kind, columns)
            given = {"y": saved} if by_y else {"x": saved, "mean": rstd if centered else None}
            call = partial(
                backward, meta(of_y, 4100, columns), [True] * 3, weight=weight, bias=bias,
                rstd=rstd, shape=(columns,), eps=1e-5, centered=centered, x_dtype=DTYPES[kind],
                **given,
            )  # fmt: skip
            unread = {} if by_y else {"bias_ptr": "not read: says whether there is one"}
            end = " from output" * by_y
            yield from launched(
                call, name, f"{columns} {words}{end}", narrow=narrow | unread, **more
            )
