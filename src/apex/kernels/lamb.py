"""The two halves of a LAMB step on float32 tiles; see :mod:`apex.ops.lamb` for the definition."""

from collections.abc import Iterator

import triton
import triton.language as tl

from apex.kernels._cases import Case
from apex.kernels.multi_tensor import case, rounded
from apex.kernels.storage import add_error, join_low_bits


@triton.jit
def lamb_term(values, scalars, own):
    """``(grad, param, exp_avg, exp_avg_sq) -> (term, exp_avg, exp_avg_sq, param^2, term^2)``.

    Scalars: gradient factor, beta1, what enters the moment, beta2, 1 - beta2, eps, the inverses of
    the two bias corrections, the L2 penalty, the decoupled decay.
    """
    grad, param, exp_avg, exp_avg_sq = values[0], values[1], values[2], values[3]
    total = grad * scalars[0] + scalars[8] * param
    exp_avg = scalars[1] * exp_avg + scalars[2] * total
    exp_avg_sq = scalars[3] * exp_avg_sq + scalars[4] * total * total
    root = tl.sqrt_rn(exp_avg_sq * scalars[7]) + scalars[5]
    term = tl.div_rn(exp_avg * scalars[6], root) + scalars[9] * param
    return term, exp_avg, exp_avg_sq, param * param, term * term


@triton.jit
def lamb_apply(values, scalars, own):
    """``(term, param) -> (param, term)``; ``own``: learning rate times trust ratio."""
    return values[1] - own[0] * values[0], values[0]


def cases() -> Iterator[Case]:
    """What is inspected."""
    states, sums = ((2, 1), (3, 2)), (3, 4)

    def term(columns: str, *stores: tuple[int, int], **others: object) -> Case:
        return case(lamb_term, columns, (*stores, *states), 10, on_device=(0,), sums=sums, **others)  # type: ignore[arg-type]

    yield term("fp32 fp32 fp32 fp32", (0, 0))
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
    yield case(lamb_apply, "fp32 fp32", ((1, 0),), own=1)
    yield case(lamb_apply, "fp32 fp16", ((1, 0),), own=1)
    yield case(lamb_apply, "fp32 bf16", ((1, 0),), own=1)
    yield case(
        lamb_apply, "fp32 fp32 fp16", ((1, 0), (2, 0)), own=1, variant="copies", write_only=(2,)
    )
