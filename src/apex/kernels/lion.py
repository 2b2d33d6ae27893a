"""The Lion update on float32 tiles; see :mod:`apex.ops.updates.lion` for the definition."""

import triton
import triton.language as tl


@triton.jit
def lion(values, s):
    """``(grad, param, average) -> (param, average, grad)``."""
    grad, param, average = values[0] * s.factor, values[1], values[2]
    mean = s.beta1 * average + s.rest1 * grad
    update = tl.where(mean > 0, 1.0, tl.where(mean < 0, -1.0, mean))  # nan stays nan
    param = param - s.lr * (update + s.weight_decay * param)
    return param, s.beta2 * average + s.rest2 * grad, grad
