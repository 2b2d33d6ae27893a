"""What is inspected of :mod:`apex.kernels.partial_sums`."""

from __future__ import annotations

from collections.abc import Iterator

from apex.kernels.partial_sums import norms_of, summed
from tools.kernels.case import CompiledCase, launched, meta


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    narrow = {"partial_ptr": "one number for 8192 elements of the tensors"}
    narrow |= {"firsts_ptr": "two numbers a tensor", "out_ptr": "one number a tensor"}
    yield from launched(
        lambda: summed(meta("fp32", 300, 1), meta("i64", 10)), "segment_sums", "fp32",
        prefix="segment_kernel", narrow=narrow,
    )  # fmt: skip
    pointers = ("sums_ptr", "norm_ptr", "each_ptr", "flag_ptr")
    yield from launched(
        lambda: norms_of(meta("fp32", 300), meta("i32", 1), each=True), "norms", "fp32",
        prefix="norm_kernel", narrow=dict.fromkeys(pointers, "one number a tensor, or one in all"),
    )  # fmt: skip
