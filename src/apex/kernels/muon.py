"""Muon's two elementwise parts on float32 tiles; see :mod:`apex.ops.updates.muon`."""

from collections.abc import Iterator

import triton
import triton.language as tl

from apex.kernels.inspect.case import CompiledCase
from apex.kernels.inspect.list_case import case
from apex.kernels.multi_tensor import widened
from apex.kernels.storage import (
    add_error,
    join_low_bits,
    keep_error,
    rounded_stochastically,
    split_low_bits,
)


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


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    scalars = "factor rest pull"
    for columns in ("fp32 fp32 bf16", "bf16 fp32 bf16", "fp32 fp32 fp32"):
        yield case(
            muon_average, columns, ((1, 0), (2, 1)), scalars, on_device="factor", write_only=(2,)
        )
    yield case(
        muon_average, "fp16 fp32 bf16", ((1, 0), (2, 1), (0, 2)), scalars, on_device="factor",
        write_only=(2,), variant="writes gradients",
    )  # fmt: skip
    for columns in ("fp32 u8 bf16", "bf16 u8 bf16"):
        yield case(
            muon_average, columns, ((1, 0), (2, 1)), scalars, on_device="factor", write_only=(2,),
            variant="8 bits",
        )  # fmt: skip
    scalars, half = "decay rate", "bf16 bf16"
    for columns in ("bf16 fp32", "fp32 fp32", half, "bf16 fp16"):
        yield case(muon_move, columns, ((1, 0),), scalars)
    yield case(
        muon_move, "bf16 fp32 fp16", ((1, 0), (2, 0)), scalars, variant="copies", write_only=(2,)
    )
    beside = ((1, 0), (2, 2))
    yield case(
        muon_move, f"{half} i16", beside, scalars, variant="low bits",
        codec=(join_low_bits, split_low_bits),
    )  # fmt: skip
    yield case(
        muon_move, f"{half} bf16", beside, scalars, variant="kahan", codec=(add_error, keep_error)
    )
    yield case(
        muon_move, half, ((1, 0),), scalars, variant="stochastic", seeded=True,
        codec=(widened, rounded_stochastically),
    )  # fmt: skip
