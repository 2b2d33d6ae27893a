"""The NovoGrad update on float32 tiles; see :mod:`apex.ops.updates.novograd` for the definition."""

import triton
import triton.language as tl


@triton.jit
def _novograd(values, s, INSIDE: tl.constexpr):
    grad, param = values[0] * s.factor, values[1]
    total = grad
    if INSIDE:
        total = tl.div_rn(grad, s.scale)
    total += s.l2 * param
    exp_avg = s.beta1 * values[2] + s.grad_share * total
    update = exp_avg * s.unbias1
    if not INSIDE:
        update = tl.div_rn(update, s.scale)
    update += s.decay * param
    return param - s.lr * update, exp_avg, grad


@triton.jit
def novograd(values, s):
    """``(grad, param, exp_avg) -> (param, exp_avg, grad)``; the update is divided by the scale."""
    return _novograd(values, s, False)


@triton.jit
def novograd_inside(values, s):
    """As `novograd`; the gradient that enters the moment is divided by the scale."""
    return _novograd(values, s, True)
