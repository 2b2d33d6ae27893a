"""Scaling and adding on float32 tiles; see :mod:`apex.ops.scale` for the definition."""

from collections.abc import Iterator

import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it)

from apex.kernels._cases import Case
from apex.kernels.multi_tensor import case


@triton.jit
def scale(values, scalars, own):
    """``(x, out) -> (factor * x, x, x^2)``."""
    x = values[0]
    return x * scalars[0], x, x * x


@triton.jit
def axpby(values, scalars, own):
    """``(x, y, out) -> (a * x + b * y, x, y)``."""
    return scalars[0] * values[0] + scalars[1] * values[1], values[0], values[1]


def cases() -> Iterator[Case]:
    """What is inspected."""
    for columns in ("fp32 fp32", "fp16 fp32", "bf16 fp32", "fp16 fp16", "fp32 bf16"):
        yield case(scale, columns, ((1, 0),), 1, write_only=(1,), flags=(1,), noop=False)
    yield case(
        scale, "fp32 fp32", ((1, 0),), 1,
        variant="norms", write_only=(1,), sums=(2,), flags=(1,), noop=False,
    )  # fmt: skip
    for columns in ("fp32 fp32 fp32", "fp16 fp32 fp32", "fp16 fp16 fp16", "bf16 bf16 bf16"):
        yield case(axpby, columns, ((2, 0),), 2, write_only=(2,), flags=(1, 2), noop=False)
