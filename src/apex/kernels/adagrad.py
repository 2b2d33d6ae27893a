"""The Adagrad update on float32 tiles; see :mod:`apex.ops.updates.adagrad` for the definition."""

import triton
import triton.language as tl


@triton.jit
def adagrad(values, s):
    """``(grad, param, sum) -> (param, sum, grad)``."""
    grad, param = values[0] * s.factor, values[1]
    total = grad + s.l2 * param
    squares = values[2] + total * total
    update = tl.div_rn(total, tl.sqrt_rn(squares) + s.eps) + s.decay * param
    return param - s.lr * update, squares, grad
