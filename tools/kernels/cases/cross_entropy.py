"""What is inspected of :mod:`apex.kernels.cross_entropy`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from apex.kernels.cross_entropy import BLOCK, _block, backward, forward
from tools.kernels.case import CompiledCase, launched, meta


def cases() -> Iterator[CompiledCase]:
    """What is inspected: few rows, which several programs share."""
    pointers = "same_logits labels largest total centered losses sums dy"
    narrow = {f"{name}_ptr": "a number or two a row or part" for name in pointers.split()}
    labels, each, sums = meta("i64", 4), meta("fp32", 4), meta("fp32", 4, 2)
    sizes = [(kind, 64 * BLOCK - 8) for kind in ("fp32", "fp16", "bf16")]
    for kind, columns in (*sizes, ("bf16", 64 * BLOCK + 1), ("bf16", 1)):
        logits = meta(kind, 4, columns)
        known: dict[str, Any] = {"logits": logits, "labels": labels, "sums": sums, "smoothing": 0.1}
        odd = f" {columns} columns" if columns % 8 else ""
        calls: list[tuple[str, Any]] = [
            ("", partial(forward, logits, labels, 0.0, -100)),
            (f"{odd} smoothed", partial(forward, logits, labels, 0.1, -100)),
            (odd, partial(backward, each, [True], **known, padding_idx=-100)),
        ]
        for words, call in calls[1 if odd else 0 :]:
            yield from launched(
                call, "cross_entropy", kind + words, writes=("out_ptr",), narrow=narrow,
                tile=min(BLOCK, _block(columns)), aligned=not odd, repeated=True,
            )  # fmt: skip
