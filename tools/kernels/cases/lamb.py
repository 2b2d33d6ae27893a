"""What is inspected of :mod:`apex.kernels.lamb`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apex.kernels.lamb import lamb_apply, lamb_term
from apex.kernels.multi_tensor import rounded
from apex.kernels.storage import add_error, join_low_bits
from tools.kernels.case import CompiledCase
from tools.kernels.list_case import case


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    scalars = "factor beta1 grad_share beta2 one_minus_beta2 eps unbias1 unbias2 l2 decay"
    states, sums = ((2, 1), (3, 2)), (3, 4)

    def term(columns: str, *stores: tuple[int, int], **others: Any) -> CompiledCase:
        return case(
            lamb_term, columns, (*stores, *states), scalars,
            **{"on_device": "factor", "sums": sums, **others},
        )  # fmt: skip

    yield term("fp32 fp32 fp32 fp32", (0, 0))
    yield term("fp32 fp32 fp32 fp32", (0, 0), variant="joined groups", per_tensor="unbias1 unbias2")
    for half in ("fp16", "bf16"):
        yield term(
            f"{half} {half} fp32 fp32 fp32", (0, 0), (4, 0), variant="scratch", write_only=(4,)
        )
    yield term(
        "fp16 fp16 fp16 fp16 fp32", (0, 0), (4, 0), variant="16-bit moments", write_only=(4,)
    )
    yield term(
        "bf16 bf16 fp32 fp32 fp32 i16", (4, 0), variant="low bits", write_only=(4,),
        codec=(join_low_bits, rounded),
    )  # fmt: skip
    yield term(
        "bf16 bf16 fp32 fp32 fp32 bf16", (4, 0), variant="kahan", write_only=(4,),
        codec=(add_error, rounded),
    )  # fmt: skip
    yield term("fp32 fp32 u8 u8", (0, 0), variant="8 bits")
    yield term(
        "fp32 fp32 bf16 bf16", (0, 0), variant="bfloat16 moments",
        dithered=(False, False, True, True),
    )  # fmt: skip
    yield term(
        "bf16 bf16 u8 u8 fp32", (0, 0), (4, 0), variant="8 bits", write_only=(4,),
    )  # fmt: skip
    for kind in ("fp32", "fp16", "bf16"):  # the first of two calls, with norms from outside
        yield case(
            lamb_term, " ".join([kind] * 5), (*states, (4, 0)), scalars,
            variant="stage 1", per_tensor="decay", write_only=(4,), noop=False,
        )  # fmt: skip
    for columns in ("fp32 fp32", "fp32 fp16", "fp32 bf16"):
        yield case(lamb_apply, columns, ((1, 0),), "rate", per_tensor="rate")
    yield case(
        lamb_apply, "fp32 fp32 fp16", ((1, 0), (2, 0)), "rate",
        per_tensor="rate", variant="copies", write_only=(2,),
    )  # fmt: skip
