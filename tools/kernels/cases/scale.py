"""What is inspected of :mod:`apex.kernels.scale`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apex.kernels.scale import axpby, scale
from tools.kernels.case import CompiledCase
from tools.kernels.list_case import case


def cases() -> Iterator[CompiledCase]:
    """What is inspected."""
    plain: dict[str, Any] = {"flags": (1,), "noop": False}
    for columns in ("fp32 fp32", "fp16 fp32", "bf16 fp32", "fp16 fp16", "fp32 bf16"):
        yield case(scale, columns, ((1, 0),), "factor", write_only=(1,), **plain)
    norms: dict[str, Any] = {"write_only": (1,), "sums": (2,), "variant": "norms"}
    yield case(scale, "fp32 fp32", ((1, 0),), "factor", **norms, **plain)
    for columns in ("fp32", "fp16", "bf16", "fp16 fp32", "bf16 fp32"):
        out = columns.count(" ")
        only = (out,) if out else ()
        yield case(
            scale, columns, ((out, 0),), "factor", variant="unscale", sums=(3,), write_only=only,
            **plain,
        )  # fmt: skip
    for dtype in ("fp32", "fp16", "bf16"):
        yield case(scale, dtype, (), "factor", variant="squares", sums=(3,), noop=False)
    yield case(scale, "fp32", (), "factor", variant="squares and flag", sums=(3,), **plain)
    largest: dict[str, Any] = {"variant": "largest", "sums": (4,), "largest": True}
    yield case(scale, "fp32", (), "factor", **largest, noop=False)
    for columns in ("fp32 fp32 fp32", "fp16 fp32 fp32", "fp16 fp16 fp16", "bf16 bf16 bf16"):
        yield case(axpby, columns, ((2, 0),), "a b", write_only=(2,), flags=(1, 2), noop=False)
