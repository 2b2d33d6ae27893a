"""The NovoGrad update on float32 tiles; see :mod:`apex.ops.novograd` for the definition."""

from collections.abc import Iterator

import triton
import triton.language as tl

from apex.kernels._cases import Case
from apex.kernels.multi_tensor import case
from apex.kernels.storage import optimizer_cases


@triton.jit
def novograd(values, scalars, own):
    """``(grad, param, exp_avg) -> (param, exp_avg, grad)``.

    Scalars: gradient factor, lr, beta1, the gradient's share, the inverse of the bias correction,
    the L2 penalty, the decoupled decay. Own: what gradient and moment are divided by.
    """
    grad, param = values[0] * scalars[0], values[1]
    total = tl.div_rn(grad, own[0]) + scalars[5] * param
    exp_avg = scalars[2] * values[2] + scalars[3] * total
    update = tl.div_rn(exp_avg * scalars[4], own[1]) + scalars[6] * param
    return param - scalars[1] * update, exp_avg, grad


def cases() -> Iterator[Case]:
    """What is inspected: moments are kept in the weight's dtype, but float32 beside a storage."""
    yield from optimizer_cases(novograd, states=1, scalars=7, own=2)
    for kind in ("fp16", "bf16"):
        columns = f"{kind} {kind} {kind}"
        yield case(novograd, columns, ((1, 0), (2, 1)), 7, own=2, on_device=(0,))
