"""What is summed for norms, on float32 tiles; see :mod:`apex.ops.norms` for the definition."""

from collections.abc import Iterator

import triton
import triton.language as tl

from apex.kernels._cases import Case
from apex.kernels.multi_tensor import case


@triton.jit
def squares(values, scalars, own):
    """``(x,) -> ((factor * x)^2, x)``."""
    x = values[0] * scalars[0]
    return x * x, values[0]


@triton.jit
def sizes(values, scalars, own):
    """``(x,) -> (|factor * x|, x)``."""
    return tl.abs(values[0] * scalars[0]), values[0]


def cases() -> Iterator[Case]:
    """What is inspected."""
    for dtype in ("fp32", "fp16", "bf16"):
        yield case(squares, dtype, (), 1, sums=(0,), noop=False)
    yield case(squares, "fp32", (), 1, variant="flag", sums=(0,), flags=(1,), noop=False)
    yield case(sizes, "fp32", (), 1, sums=(0,), largest=True, noop=False)
