"""The NovoGrad update on float32 tiles; see :mod:`apex.ops.updates.novograd` for the definition."""

from collections.abc import Iterator

import triton
import triton.language as tl

from apex.kernels.inspect.case import CompiledCase
from apex.kernels.storage import optimizer_cases


@triton.jit
def novograd(values, s):
    """``(grad, param, exp_avg) -> (param, exp_avg, grad)``."""
    grad, param = values[0] * s.factor, values[1]
    total = tl.div_rn(grad, s.grad_divisor) + s.l2 * param
    exp_avg = s.beta1 * values[2] + s.grad_share * total
    update = tl.div_rn(exp_avg * s.unbias1, s.moment_divisor) + s.decay * param
    return param - s.lr * update, exp_avg, grad


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    scalars = "factor lr beta1 grad_share unbias1 l2 decay grad_divisor moment_divisor"
    yield from optimizer_cases(
        novograd, states=1, scalars=scalars, per_tensor="moment_divisor", narrow_states=True
    )
