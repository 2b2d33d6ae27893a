"""The unscaling update on tiles; see :mod:`apex.ops.lists.unscale` for the definition."""

from collections.abc import Iterator

import triton
import triton.language as tl

from apex.kernels.inspect.case import Case
from apex.kernels.inspect.list_case import case


@triton.jit
def unscale(values, s):
    """``(scaled gradient, ...) -> (gradient, its square, scaled gradient)``."""
    grad = (values[0] * s.factor).to(tl.float32)
    return grad, grad * grad, values[0]


def cases() -> Iterator[Case]:
    """What is inspected."""
    for columns in ("fp32", "fp16", "bf16"):
        yield case(unscale, columns, ((0, 0),), "factor", sums=(1,), flags=(2,), noop=False)
    for columns in ("fp16 fp32", "bf16 fp32"):
        yield case(
            unscale, columns, ((1, 0),), "factor",
            sums=(1,), flags=(2,), write_only=(1,), noop=False,
        )  # fmt: skip
