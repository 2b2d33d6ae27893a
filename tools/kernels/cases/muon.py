"""What is inspected of :mod:`apex.kernels.muon`."""

from __future__ import annotations

from collections.abc import Iterator

from apex.kernels.multi_tensor import widened
from apex.kernels.muon import muon_average, muon_move
from apex.kernels.storage import (
    add_error,
    join_low_bits,
    keep_error,
    rounded_stochastically,
    split_low_bits,
)
from tools.kernels.case import CompiledCase
from tools.kernels.list_case import case


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
    for columns in ("fp32 bf16 bf16", "bf16 bf16 bf16"):
        yield case(
            muon_average, columns, ((1, 0), (2, 1)), scalars, on_device="factor", write_only=(2,),
            variant="bfloat16 moments", dithered=(False, True, False),
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
