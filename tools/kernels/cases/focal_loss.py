"""What is inspected of :mod:`apex.kernels.focal_loss`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

from apex.kernels.focal_loss import backward, forward
from tools.kernels.case import CompiledCase, launched, meta


def cases() -> Iterator[CompiledCase]:
    """What is compiled and inspected."""
    one, targets = meta("fp32", 1), meta("i64", 4095)
    usual = itertools.product(("fp16", "bf16", "fp32"), (1.5, 2.0), (91,))
    for kind, gamma, classes in (*usual, ("bf16", 2.0, 64), ("bf16", 2.0, 1)):
        x = meta(kind, 4095, classes)
        known: dict[str, Any] = {"targets": targets, "num_positives": one, "classes": classes}
        known |= {"alpha": 0.25, "gamma": gamma, "smoothing": 0.1}
        for way, call in (
            ("forward", partial(forward, x, *known.values())),
            ("backward", partial(backward, one, [True], logits=x, **known)),
        ):
            yield from launched(
                call, "focal_loss", f"{way} {kind}{' squared' * (gamma == 2.0)}"
                + f" {classes} columns" * (classes != 91),
                writes=("out_ptr",), tail=True,
                narrow={"targets_ptr": "one number a row", "sums_ptr": "one number a program"}
                | dict.fromkeys(("dy_ptr", "positives_ptr"), "one number"),
                computes="an exponential, a logarithm, a division and some 15 comparisons an "
                "element",
            )  # fmt: skip
