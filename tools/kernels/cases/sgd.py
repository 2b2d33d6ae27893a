"""What is inspected of :mod:`apex.kernels.sgd`."""

from __future__ import annotations

from collections.abc import Iterator

from apex.kernels.sgd import momentum, sgd
from tools.kernels.case import CompiledCase
from tools.kernels.list_case import case, optimizer_cases


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
