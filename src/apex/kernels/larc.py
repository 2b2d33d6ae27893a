"""LARC on float32 tiles; see :mod:`apex.ops.updates.larc` for the definition."""

from collections.abc import Iterator

import triton
import triton.language as tl  # noqa: F401 - the interpreter looks for it

from apex.kernels.inspect.case import CompiledCase
from apex.kernels.inspect.list_case import case


@triton.jit
def larc(values, s):
    """``(grad, param) -> (grad,)``."""
    return ((values[0] + s.decay * values[1]) * s.rate,)


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    for dtypes in ("fp32 fp32", "fp16 fp16", "bf16 bf16"):
        yield case(larc, dtypes, ((0, 0),), "rate decay", per_tensor="rate decay", noop=False)
