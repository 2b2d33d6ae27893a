"""What is inspected of :mod:`apex.kernels.adagrad`."""

from __future__ import annotations

from collections.abc import Iterator

from apex.kernels.adagrad import adagrad
from tools.kernels.case import CompiledCase
from tools.kernels.list_case import optimizer_cases


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    scalars = "factor lr eps l2 decay"
    yield from optimizer_cases(adagrad, states=1, scalars=scalars, narrow_states=True)
