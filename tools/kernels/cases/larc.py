"""What is inspected of :mod:`apex.kernels.larc`."""

from __future__ import annotations

from collections.abc import Iterator

from apex.kernels.larc import larc
from tools.kernels.case import CompiledCase
from tools.kernels.list_case import case


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    for dtypes in ("fp32 fp32", "fp16 fp16", "bf16 bf16"):
        yield case(larc, dtypes, ((0, 0),), "rate decay", per_tensor="rate decay", noop=False)
