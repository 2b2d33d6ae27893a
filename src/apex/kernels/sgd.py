"""The SGD updates on float32 tiles; see :mod:`apex.ops.updates.sgd` for the definition."""

from collections.abc import Iterator

import triton
import triton.language as tl

from apex.kernels.inspect.case import CompiledCase
from apex.kernels.inspect.list_case import case
from apex.kernels.storage import optimizer_cases


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


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    scalars = "factor lr momentum one_minus_dampening l2 late_decay lookahead first"
    yield from optimizer_cases(sgd, states=0, scalars="factor lr weight_decay")
    yield from optimizer_cases(momentum, states=1, scalars=scalars, narrow_states=True)
    for columns in ("fp16 fp16 fp16", "bf16 bf16 bf16"):
        yield case(
            momentum, columns, ((1, 0), (2, 1)), scalars,
            on_device="factor", per_tensor="first", variant="first step",
        )  # fmt: skip
