"""Ops on tensors: forward and every gradient, beside torch's own functions in float64.

One rounding is allowed, or a few eps where sums of terms of both signs decide. In float32 twice
the error of torch's own float32 function is allowed too: sums over thousands of rows round at
every addition. (4 x 320 x 64 x 64, gradient of a group norm's weight: torch's is 10
eps off.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from apex.bench import tolerance
from apex.bench.catalogue.entry import DTYPES, Function, Inputs, Op
from apex.bench.catalogue.ops import OPS
from apex.bench.selftest.check import Check, Measured, Setting, same

__all__ = ["CHECKED", "checks"]

AREA = "norms and losses"
CHECKED = [op for op in OPS if op.small]


def checks() -> Iterator[Check]:
    """The checks of this module."""
    for op in CHECKED:
        for dtype in op.dtypes:
            for mode in ("forward", "backward"):
                run = partial(_compared, op, DTYPES[dtype], mode == "backward")
                yield Check(AREA, f"{op.title}, {dtype}, {mode}", run)


def _compared(op: Op, dtype: torch.dtype, backward: bool, setting: Setting) -> Iterator[Measured]:
    for shape in (*op.small, *(op.busy if setting.large else ())):
        inputs = op.inputs(shape, dtype, setting.device)
        found, again = (_results(op.ours, inputs, backward) for _ in range(2))
        exact, torchs = (
            _results(op.theirs, inputs, backward, to) for to in (torch.float64, torch.float32)
        )
        size = "x".join(map(str, shape))
        for name, one in found.items():
            three = (one, exact[name], torchs[name])
            yield _judged(f"{name}, {size}", *three, op.in_eps.get(dtype), dtype, setting)
        yield same(f"second call, {size}", [*found.values()], [*again.values()])


def _judged(
    what: str, found: torch.Tensor, exact: torch.Tensor, torchs: torch.Tensor,
    in_eps: float | None, dtype: torch.dtype, setting: Setting,
) -> Measured:  # fmt: skip
    error: Callable[[torch.Tensor], float] = lambda x: (  # noqa: E731
        tolerance.roundings(x, exact, truncated=setting.interpreted)
        if in_eps is None
        else tolerance.errors_in_eps(x, exact, dtype)
    )
    if found.shape != exact.shape:
        return Measured(what, float("inf"), 0, "wrong shape")
    allowed = tolerance.ROUNDINGS[found.dtype] if in_eps is None else in_eps
    if found.dtype == torch.float32:
        allowed = max(allowed, 2 * error(torchs))
    return Measured(what, error(found), allowed, "roundings" if in_eps is None else "eps")


def _results(
    function: Function, inputs: Inputs, backward: bool, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The output, or the gradients, by the names of the report."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs.leaves]
    y = function(*leaves, *inputs.rest)
    if not backward:
        return {"output": y.detach()}
    generator = torch.Generator().manual_seed(1)
    # Multiples of 1/8, which every dtype holds: the exact result starts from the same gradient.
    grad = torch.randint(-16, 17, y.shape, generator=generator).to(y) / 8
    found = torch.autograd.grad(y, leaves, grad)
    names = ["input", "weight", "bias"]
    return {f"gradient of {name}": one for name, one in zip(names, found, strict=False)}
