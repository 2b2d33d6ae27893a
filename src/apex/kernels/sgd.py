"""The SGD updates on float32 tiles; see :mod:`apex.ops.updates.sgd` for the definition."""

import triton
import triton.language as tl


@triton.jit
def sgd(values, s):
    """``(grad, param) -> (param, grad)``."""
    grad, param = values[0] * s.factor, values[1]
    return param - s.lr * (grad + s.weight_decay * param), grad


@triton.jit
def momentum(values, s):
    """``(grad, param, buffer) -> (param, buffer, grad)``."""
    grad, param, buffer = values[0] * s.factor, values[1], values[2]
    total = grad + s.l2 * param
    buffer = s.momentum * buffer + s.one_minus_dampening * total
    buffer = tl.where(s.first != 0, total + 0.0, buffer)  # never -0.0
    update = tl.where(s.lookahead != 0, total + s.lookahead * buffer, buffer)
    return param - s.lr * (update + s.late_decay * param), buffer, grad
