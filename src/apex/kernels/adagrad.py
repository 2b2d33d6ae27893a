"""The Adagrad update on float32 tiles; see :mod:`apex.ops.adagrad` for the definition."""

from collections.abc import Iterator

import triton
import triton.language as tl

from apex.kernels._cases import Case
from apex.kernels.multi_tensor import case
from apex.kernels.storage import optimizer_cases


@triton.jit
def adagrad(values, scalars, own):
    """``(grad, param, sum) -> (param, sum, grad)``.

    Scalars: gradient factor, lr, eps, the L2 penalty, the decoupled decay.
    """
    grad, param = values[0] * scalars[0], values[1]
    total = grad + scalars[3] * param
    squares = values[2] + total * total
    update = tl.div_rn(total, tl.sqrt_rn(squares) + scalars[2]) + scalars[4] * param
    return param - scalars[1] * update, squares, grad


def cases() -> Iterator[Case]:
    """What is inspected: sums are kept in the weight's dtype, but float32 beside a storage."""
    yield from optimizer_cases(adagrad, states=1, scalars=5)
    for kind in ("fp16", "bf16"):
        yield case(adagrad, f"{kind} {kind} {kind}", ((1, 0), (2, 1)), 5, on_device=(0,))
