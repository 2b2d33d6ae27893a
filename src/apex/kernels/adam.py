"""The Adam update on float32 tiles; see :mod:`apex.ops.updates.adam` for the definition."""

import triton
import triton.language as tl

SCALARS = "factor lr beta1 one_minus_beta1 beta2 one_minus_beta2 eps unbias1 unbias2 l2 decay"


@triton.jit
def _adam(values, s, EPS_INSIDE: tl.constexpr):
    grad, param, exp_avg, exp_avg_sq = values[0], values[1], values[2], values[3]
    grad = grad * s.factor
    total = grad + s.l2 * param
    exp_avg = s.beta1 * exp_avg + s.one_minus_beta1 * total
    exp_avg_sq = s.beta2 * exp_avg_sq + s.one_minus_beta2 * total * total
    if EPS_INSIDE:
        root = tl.sqrt_rn(exp_avg_sq * s.unbias2 + s.eps)
    else:
        root = tl.sqrt_rn(exp_avg_sq * s.unbias2) + s.eps
    update = tl.div_rn(exp_avg * s.unbias1, root) + s.decay * param
    return param - s.lr * update, exp_avg, exp_avg_sq, grad


@triton.jit
def adam(values, s):
    """``(grad, param, exp_avg, exp_avg_sq) -> (param, exp_avg, exp_avg_sq, grad)``."""
    return _adam(values, s, False)


@triton.jit
def adam_eps_inside(values, s):
    """As `adam`, with eps below the root."""
    return _adam(values, s, True)
