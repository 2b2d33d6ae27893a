"""Muon's two elementwise parts on float32 tiles; see :mod:`apex.ops.updates.muon`."""

import triton
import triton.language as tl


@triton.jit
def muon_average(values, s):
    """``(grad, buffer) -> (buffer, direction, grad)``."""
    grad, buffer = values[0] * s.factor, values[1]
    buffer = buffer + s.rest * (grad - buffer)
    direction = tl.where(s.pull == 0, buffer, buffer - s.pull * (buffer - grad))
    return buffer, direction, grad


@triton.jit
def muon_move(values, s):
    """``(update, param) -> (param, update)``."""
    update, param = values[0], values[1]
    return param - (s.decay * param + s.rate * update), update
