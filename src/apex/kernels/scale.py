"""Scaling, measuring and adding on float32 tiles; definition: :mod:`apex.ops.lists.scale`."""

import triton
import triton.language as tl


@triton.jit
def scale(values, s):
    """``(x, ...) -> (factor * x, x, x^2, (factor * x)^2, |factor * x|)``; few are asked for."""
    x, scaled = values[0], values[0] * s.factor
    return scaled, x, x * x, scaled * scaled, tl.abs(scaled)


@triton.jit
def axpby(values, s):
    """``(x, y, out) -> (a * x + b * y, x, y)``."""
    return s.a * values[0] + s.b * values[1], values[0], values[1]
