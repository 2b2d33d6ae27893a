"""What is inspected of :mod:`apex.kernels.index_mul_2d`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from apex.kernels.index_mul_2d import COLUMNS, TILE, backward
from tools.kernels.case import CompiledCase, launched, meta


def cases() -> Iterator[CompiledCase]:
    """What is compiled and inspected."""
    narrow = dict.fromkeys(("index_ptr", "order_ptr"), "one number a row")
    narrow |= {"firsts_ptr": "two numbers a program", "out_ptr": "one row a program"}
    index = meta("i64", 4100)
    usual = [(kind, 1000) for kind in ("fp16", "bf16", "fp32")]
    for kind, columns in (*usual, ("bf16", COLUMNS + 1), ("bf16", 1)):
        x, odd = meta(kind, 4100, columns), columns % 8
        yield from launched(
            partial(backward, x, [True, True], in2=x, in1=x, index=index), "index_mul_2d",
            f"{kind} {columns} columns" if odd else kind, writes=("y_ptr",), narrow=narrow,
            aligned=not odd, tile=TILE,
        )  # fmt: skip
