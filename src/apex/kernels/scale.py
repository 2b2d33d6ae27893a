"""Scaling, measuring and adding on float32 tiles; definition: :mod:`apex.ops.lists.scale`."""

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from apex.kernels.inspect.case import CompiledCase
from apex.kernels.inspect.list_case import case


@triton.jit
def scale(values, s):
    """``(x, ...) -> (factor * x, x, x^2, (factor * x)^2, |factor * x|)``; few are asked for."""
    x, scaled = values[0], values[0] * s.factor
    return scaled, x, x * x, scaled * scaled, tl.abs(scaled)


@triton.jit
def axpby(values, s):
    """``(x, y, out) -> (a * x + b * y, x, y)``."""
    return s.a * values[0] + s.b * values[1], values[0], values[1]


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
