"""The NovoGrad update on float32 tiles; see :mod:`apex.ops.updates.novograd` for the definition."""

import triton
import triton.language as tl


@triton.jit
def novograd(values, s):
    """``(grad, param, exp_avg) -> (param, exp_avg, grad)``."""
    grad, param = values[0] * s.factor, values[1]
    total = tl.div_rn(grad, s.grad_divisor) + s.l2 * param
    exp_avg = s.beta1 * values[2] + s.grad_share * total
    update = tl.div_rn(exp_avg * s.unbias1, s.moment_divisor) + s.decay * param
    return param - s.lr * update, exp_avg, grad
