"""What is inspected of :mod:`apex.kernels.adam_swa`."""

from __future__ import annotations

from collections.abc import Iterator

from apex.kernels.adam import SCALARS
from apex.kernels.adam_swa import adam_swa, adam_swa_first
from tools.kernels.case import CompiledCase
from tools.kernels.list_case import case


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    stores = ((1, 0), (2, 1), (3, 2), (4, 3), (5, 0))
    for update in (adam_swa, adam_swa_first):
        first = update is adam_swa_first
        yield case(
            update, "bf16 fp32 fp32 fp32 fp32 bf16", stores, f"{SCALARS} share",
            write_only=(4, 5) if first else (5,),
        )  # fmt: skip
