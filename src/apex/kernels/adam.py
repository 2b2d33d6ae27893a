"""The Adam update on float32 tiles; see :mod:`apex.ops.adam` for the definition."""

from collections.abc import Iterator

import triton
import triton.language as tl

from apex.kernels._cases import Case
from apex.kernels.storage import optimizer_cases


@triton.jit
def adam(values, scalars, own):
    """``(grad, param, exp_avg, exp_avg_sq) -> (param, exp_avg, exp_avg_sq, grad)``.

    Scalars: gradient factor, lr, beta1, 1 - beta1, beta2, 1 - beta2, eps, the
    inverses of the two bias corrections, the L2 penalty, the decoupled decay.
    """
    grad, param, exp_avg, exp_avg_sq = values[0], values[1], values[2], values[3]
    grad = grad * scalars[0]
    total = grad + scalars[9] * param
    exp_avg = scalars[2] * exp_avg + scalars[3] * total
    exp_avg_sq = scalars[4] * exp_avg_sq + scalars[5] * total * total
    root = tl.sqrt_rn(exp_avg_sq * scalars[8]) + scalars[6]
    update = tl.div_rn(exp_avg * scalars[7], root) + scalars[10] * param
    return param - scalars[1] * update, exp_avg, exp_avg_sq, grad


@triton.jit
def adam_eps_inside(values, scalars, own):
    """As `adam`, with eps below the root."""
    grad, param, exp_avg, exp_avg_sq = values[0], values[1], values[2], values[3]
    grad = grad * scalars[0]
    total = grad + scalars[9] * param
    exp_avg = scalars[2] * exp_avg + scalars[3] * total
    exp_avg_sq = scalars[4] * exp_avg_sq + scalars[5] * total * total
    root = tl.sqrt_rn(exp_avg_sq * scalars[8] + scalars[6])
    update = tl.div_rn(exp_avg * scalars[7], root) + scalars[10] * param
    return param - scalars[1] * update, exp_avg, exp_avg_sq, grad


def cases() -> Iterator[Case]:
    """What is inspected."""
    yield from optimizer_cases(adam, states=2, scalars=11)
    yield from optimizer_cases(adam_eps_inside, states=2, scalars=11)
