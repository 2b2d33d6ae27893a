"""The two halves of a LAMB step on float32 tiles; definition: :mod:`apex.ops.updates.lamb`."""

import triton
import triton.language as tl


@triton.jit
def lamb_term(values, s):
    """``(grad, param, exp_avg, exp_avg_sq) -> (term, exp_avg, exp_avg_sq, param^2, term^2)``."""
    grad, param, exp_avg, exp_avg_sq = values[0], values[1], values[2], values[3]
    total = grad * s.factor + s.l2 * param
    exp_avg = s.beta1 * exp_avg + s.grad_share * total
    exp_avg_sq = s.beta2 * exp_avg_sq + s.one_minus_beta2 * total * total
    root = tl.sqrt_rn(exp_avg_sq * s.unbias2) + s.eps
    term = tl.div_rn(exp_avg * s.unbias1, root) + s.decay * param
    return term, exp_avg, exp_avg_sq, param * param, term * term


@triton.jit
def lamb_apply(values, s):
    """``(term, param) -> (param, term)``."""
    return values[1] - s.rate * values[0], values[0]
