"""The SGD updates on float32 tiles; see :mod:`apex.ops.sgd` for the definition."""

from collections.abc import Iterator

import triton
import triton.language as tl

from apex.kernels._cases import Case
from apex.kernels.multi_tensor import case
from apex.kernels.storage import optimizer_cases


@triton.jit
def sgd(values, scalars, own):
    """``(grad, param) -> (param, grad)``.

    Scalars: gradient factor, lr, weight decay.
    """
    grad, param = values[0] * scalars[0], values[1]
    return param - scalars[1] * (grad + scalars[2] * param), grad


@triton.jit
def momentum(values, scalars, own):
    """``(grad, param, buffer) -> (param, buffer, grad)``.

    Scalars: gradient factor, lr, momentum, 1 - dampening, the L2 penalty, the decay after the
    momentum, how far to look ahead. Own, if any: not 0 where the buffer has no history.
    """
    grad, param, buffer = values[0] * scalars[0], values[1], values[2]
    total = grad + scalars[4] * param
    carried = scalars[2] * buffer + scalars[3] * total
    if len(own) > 0:
        carried = tl.where(own[0] != 0, total, carried)
    update = tl.where(scalars[6] != 0, total + scalars[6] * carried, carried)
    return param - scalars[1] * (update + scalars[5] * param), carried, grad


def cases() -> Iterator[Case]:
    """What is inspected: buffers are kept in the weight's dtype, but float32 beside a storage."""
    yield from optimizer_cases(sgd, states=0, scalars=3)
    yield from optimizer_cases(momentum, states=1, scalars=7)
    stores = ((1, 0), (2, 1))
    for kind in ("fp16", "bf16"):
        columns = f"{kind} {kind} {kind}"
        yield case(momentum, columns, stores, 7, on_device=(0,))
        yield case(momentum, columns, stores, 7, on_device=(0,), own=1, variant="first step")
