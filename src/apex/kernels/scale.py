"""Scaling and adding on float32 tiles; see :mod:`apex.ops.lists.scale` for the definition."""

from collections.abc import Iterator

import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it)

from apex.kernels.inspect.case import Case
from apex.kernels.inspect.list_case import case


@triton.jit
def scale(values, s):
    """``(x, out) -> (factor * x, x, x^2)``."""
    x = values[0]
    return x * s.factor, x, x * x


@triton.jit
def axpby(values, s):
    """``(x, y, out) -> (a * x + b * y, x, y)``."""
    return s.a * values[0] + s.b * values[1], values[0], values[1]


def cases() -> Iterator[Case]:
    """What is inspected."""
    for columns in ("fp32 fp32", "fp16 fp32", "bf16 fp32", "fp16 fp16", "fp32 bf16"):
        yield case(scale, columns, ((1, 0),), "factor", write_only=(1,), flags=(1,), noop=False)
    yield case(
        scale, "fp32 fp32", ((1, 0),), "factor",
        variant="norms", write_only=(1,), sums=(2,), flags=(1,), noop=False,
    )  # fmt: skip
    for columns in ("fp32 fp32 fp32", "fp16 fp32 fp32", "fp16 fp16 fp16", "bf16 bf16 bf16"):
        yield case(axpby, columns, ((2, 0),), "a b", write_only=(2,), flags=(1, 2), noop=False)
