"""Parts of a report's sentence about an origin."""

from __future__ import annotations

import torch

from apex.debug.tracing import Origin

__all__ = ["bad", "dtype_of", "outside", "range_of", "what"]


def bad(origin: Origin) -> str:
    """How many values were NaN and inf."""
    nan, inf = origin.values["nan"], origin.values["inf"]
    parts = [f"{count} {name}" for count, name in ((nan, "NaN"), (inf, "inf")) if count]
    return f"{' and '.join(parts)} of {origin.values['elements']} values"


def dtype_of(origin: Origin) -> str:
    """The dtype of the values."""
    return str(origin.values["dtype"])


def what(origin: Origin) -> str:
    """The operation with module, direction and line, for a sentence."""
    name = origin.name.removeprefix("aten.").partition(".")[0]
    where = ""
    if origin.module is not None:
        where = f" in module {origin.module}" if origin.module else " in the model's forward"
    line = f"at {origin.line}" if origin.line else ""
    if origin.node:
        line = f"in {origin.node}" + f", the backward of {origin.line}" * bool(origin.line)
    line = f" ({line})" if line else ""
    return f"{name}{where}{line}"


def range_of(origin: Origin, largest: float | None) -> str:
    """What was bad in 16 bits, and what it is in float32."""
    dtype = dtype_of(origin)
    if not hasattr(torch, dtype):
        return bad(origin)
    limit = torch.finfo(getattr(torch, dtype)).max
    text = f"{bad(origin)} in {dtype}, and finite values in float32"
    if largest is not None and largest > limit:
        text += f": {largest:.4g} is beyond {dtype}'s largest number, {limit:.5g}"
    return text


def outside(origin: Origin, name: str) -> str:
    """The sentence about what came from outside of the replayed operations."""
    rows = origin.values.get("rows", [])
    if origin.kind == "input":
        shown = ", ".join(map(str, rows))
        where = f" (row{'s' if len(rows) > 1 else ''} {shown})" if rows else ""
        return f"I{origin.name[1:]} was not finite: {bad(origin)}{where}."
    if origin.kind == "memory":
        return (
            f"{what(origin)} gave memory that nothing had written before it was read; or a "
            "kernel wrote it that torch does not see."
        )
    if origin.kind == "collective":
        return f"{origin.name} brought {bad(origin)} from {name}."
    if origin.kind == "tensor":
        return f"{bad(origin)} came from {name}."
    return f"The {origin.kind} {origin.name} was not finite: it has {bad(origin)}."
