"""LAMB's first half with a decay for each tensor; see :mod:`apex.ops.lamb_stages`."""

from collections.abc import Iterator

import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it)

from apex.kernels._cases import Case
from apex.kernels.lamb import lamb_term
from apex.kernels.multi_tensor import case


@triton.jit
def lamb_stage1(values, scalars, own):
    """As ``lamb_term``, with the decoupled decay in ``own`` and ``update`` as a fifth column."""
    return lamb_term(values, scalars + (own[0],), own)


def cases() -> Iterator[Case]:
    """What is inspected."""
    stores = ((2, 1), (3, 2), (4, 0))
    for kind in ("fp32", "fp16", "bf16"):
        columns = " ".join([kind] * 5)
        yield case(lamb_stage1, columns, stores, 9, own=1, write_only=(4,), noop=False)
