"""What is inspected of :mod:`apex.kernels.lion`."""

from __future__ import annotations

from collections.abc import Iterator

from apex.kernels.lion import lion
from tools.kernels.case import CompiledCase
from tools.kernels.list_case import optimizer_cases


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    scalars = "factor lr weight_decay beta1 rest1 beta2 rest2"
    yield from optimizer_cases(lion, states=1, scalars=scalars)
