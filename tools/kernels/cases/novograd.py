"""What is inspected of :mod:`apex.kernels.novograd`."""

from __future__ import annotations

from collections.abc import Iterator

from apex.kernels.novograd import novograd
from tools.kernels.case import CompiledCase
from tools.kernels.list_case import optimizer_cases


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    scalars = "factor lr beta1 grad_share unbias1 l2 decay grad_divisor moment_divisor"
    yield from optimizer_cases(
        novograd, states=1, scalars=scalars, per_tensor="moment_divisor", narrow_states=True
    )
