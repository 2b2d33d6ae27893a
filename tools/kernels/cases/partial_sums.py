"""What is inspected of :mod:`apex.kernels.partial_sums`."""

from __future__ import annotations

from collections.abc import Iterator

from apex.kernels.partial_sums import summed
from tools.kernels.case import CompiledCase, launched, meta


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    narrow = {"partial_ptr": "one number for 8192 elements of the tensors"}
    narrow |= {"firsts_ptr": "two numbers a tensor", "out_ptr": "one number a tensor"}
    yield from launched(
        lambda: summed(meta("fp32", 300, 1), meta("i64", 10)), "segment_sums", "fp32",
        prefix="segment_kernel", narrow=narrow,
    )  # fmt: skip
