"""LARC on float32 tiles; see :mod:`apex.ops.updates.larc` for the definition."""

import triton
import triton.language as tl  # noqa: F401 - the interpreter looks for it


@triton.jit
def larc(values, s):
    """``(grad, param) -> (grad,)``."""
    return ((values[0] + s.decay * values[1]) * s.rate,)
