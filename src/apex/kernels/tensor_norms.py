"""What is summed for norms, on float32 tiles; see :mod:`apex.ops.lists.tensor_norms`."""

from collections.abc import Iterator

import triton
import triton.language as tl

from apex.kernels.inspect.case import Case
from apex.kernels.inspect.list_case import case


@triton.jit
def squares(values, s):
    """``(x,) -> ((factor * x)^2, x)``."""
    x = values[0] * s.factor
    return x * x, values[0]


@triton.jit
def magnitudes(values, s):
    """``(x,) -> (|factor * x|, x)``."""
    return tl.abs(values[0] * s.factor), values[0]


def cases() -> Iterator[Case]:
    """What is inspected."""
    for dtype in ("fp32", "fp16", "bf16"):
        yield case(squares, dtype, (), "factor", sums=(0,), noop=False)
    yield case(squares, "fp32", (), "factor", variant="flag", sums=(0,), flags=(1,), noop=False)
    yield case(magnitudes, "fp32", (), "factor", sums=(0,), largest=True, noop=False)
