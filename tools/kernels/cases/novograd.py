"""What is inspected of :mod:`apex.kernels.novograd`."""

from __future__ import annotations

from collections.abc import Iterator

from apex.kernels.novograd import novograd, novograd_inside
from tools.kernels.case import CompiledCase
from tools.kernels.list_case import optimizer_cases


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    scalars = "factor lr beta1 grad_share unbias1 l2 decay scale"
    for update in (novograd, novograd_inside):
        yield from optimizer_cases(
            update, states=1, scalars=scalars, per_tensor="scale", narrow_states=True
        )
