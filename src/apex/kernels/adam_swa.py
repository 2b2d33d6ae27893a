"""Adam with an average of the weights; see :mod:`apex.ops.updates.adam_swa` for the definition."""

import triton
import triton.language as tl

from apex.kernels.adam import adam


@triton.jit
def _adam_swa(values, s, FIRST: tl.constexpr):
    param, exp_avg, exp_avg_sq, grad = adam(values, s)
    average = param
    if not FIRST:
        average = values[4] + s.share * (param - values[4])
    return param, exp_avg, exp_avg_sq, average, grad


@triton.jit
def adam_swa(values, s):
    """``(grad, param, exp_avg, exp_avg_sq, average) -> (param, ..., average, grad)``."""
    return _adam_swa(values, s, False)


@triton.jit
def adam_swa_first(values, s):
    """As `adam_swa`; the average becomes the weight."""
    return _adam_swa(values, s, True)
