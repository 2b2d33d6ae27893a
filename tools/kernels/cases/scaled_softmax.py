"""What is inspected of :mod:`apex.kernels.scaled_softmax`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from apex.kernels.scaled_softmax import WIDEST_BACKWARD, WIDEST_FORWARD, backward, forward
from tools.kernels.case import CompiledCase, launched, meta


def cases() -> Iterator[CompiledCase]:
    """What is inspected: several rows in a tile, the longest of one block, longer and odd ones."""
    half = {True: 0.5, False: 1.0}  # causal rows are read up to the diagonal
    narrow = {"mask_ptr": "8 bytes beside 8 logits"}
    for kind in ("fp32", "bf16"):  # float16 has the widths of bfloat16
        for n_cols in (1000, WIDEST_FORWARD, 2 * WIDEST_FORWARD):
            x, bytes_ = meta(kind, 2, 3, 500, n_cols), meta("u8", 2, 3, 500, n_cols)
            masked: Any = (bytes_, False, "masked", ("x_ptr", "mask_ptr"))
            for mask, causal, words, reads in (masked, (None, True, "causal", ("x_ptr",))):
                yield from launched(
                    partial(forward, x, mask, 0.5, causal), "scaled_softmax",
                    f"{n_cols} {kind} {words}", reads=reads, writes=("y_ptr",), narrow=narrow,
                    read=half[causal],
                )  # fmt: skip
        for n_cols in (1000, WIDEST_BACKWARD, 2 * WIDEST_BACKWARD):
            y = meta(kind, 2, 3, 500, n_cols)
            for causal in (False, True):
                yield from launched(
                    partial(backward, y, [True], y=y, scale=0.5, causal=causal), "scaled_softmax",
                    f"{n_cols} {kind}{' causal' * causal}", writes=("dx_ptr",), read=half[causal],
                )  # fmt: skip
    for n_cols in (1, 1001, 2 * WIDEST_FORWARD + 1):
        x, bytes_ = meta("bf16", 2, 3, 500, n_cols), meta("u8", 2, 3, 500, n_cols)
        back = partial(backward, x, [True], y=x, scale=0.5, causal=False)
        for call, reads, to in (
            (partial(forward, x, bytes_, 0.5, False), ("x_ptr", "mask_ptr"), "y_ptr"),
            (back, ("dy_ptr", "y_ptr"), "dx_ptr"),
        ):
            yield from launched(
                call, "scaled_softmax", f"{n_cols} bf16", reads=reads, writes=(to,), narrow=narrow,
                aligned=False,
            )  # fmt: skip
