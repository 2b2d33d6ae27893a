"""What is inspected of :mod:`apex.kernels.swiglu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from apex.kernels.swiglu import BLOCK, backward, forward
from tools.kernels.case import CompiledCase, launched, meta


def cases() -> Iterator[CompiledCase]:
    """What is compiled and inspected."""
    for kind, columns in (("fp16", 1001), ("bf16", 1001), ("fp32", 1001), ("bf16", 1024)):
        x = meta(kind, 4099, columns)
        for call in (partial(forward, x, x), partial(backward, x, [True, True], gate=x, up=x)):
            writes = ("y_ptr", "dgate_ptr", "dup_ptr")
            yield from launched(
                call, "swiglu", f"{kind}{' whole' * (columns == BLOCK)}", writes=writes, tail=True
            )
