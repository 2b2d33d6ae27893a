"""What is inspected of :mod:`apex.kernels.adam`."""

from __future__ import annotations

from collections.abc import Iterator

from apex.kernels.adam import SCALARS, adam, adam_eps_inside
from tools.kernels.case import CompiledCase
from tools.kernels.list_case import case, optimizer_cases


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    yield from optimizer_cases(adam, states=2, scalars=SCALARS)
    yield from optimizer_cases(adam_eps_inside, states=2, scalars=SCALARS)
    yield case(
        adam, "fp32 fp32 fp32 fp32", ((1, 0), (2, 1), (3, 2)), SCALARS,
        variant="joined groups", on_device="factor", per_tensor="unbias1 unbias2",
    )  # fmt: skip
