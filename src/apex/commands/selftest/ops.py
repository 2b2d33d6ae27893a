"""Ops on tensors, forward and backward, and on lists, beside float64; twice with the same bits.

One rounding is allowed, or a few eps where sums of terms of both signs decide. In float32 twice the
error of torch's own float32 function is allowed too: sums over thousands of rows round at every
addition. (4 x 320 x 64 x 64, gradient of a group norm's weight: torch's is 10 eps off.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch

from apex.catalogue import tolerance
from apex.catalogue.entry import DTYPES, Function, Inputs, Op, random
from apex.catalogue.lists import LISTS, ListOp
from apex.catalogue.ops import OPS
from apex.commands.selftest.check import Check, Measured, Setting, one_rounding, same

__all__ = ["CHECKED", "checks", "rarely", "tensors"]

CHECKED = [op for op in OPS if op.checked.small]
SHAPES = ((), (1,), (0,), (7,), (33, 5), (1025,), (8193,))  # 8193: one more than a block
LARGE = ((1_000_003,), (3000, 1000))
LOSS_SCALE = 2.0**12  # without it, gradients of a mean over many rows underflow in float16


def checks() -> Iterator[Check]:
    """The checks of this module."""
    for op in CHECKED:
        for dtype in op.dtypes:
            for mode in ("forward", "backward"):
                run = partial(_op, op, DTYPES[dtype], mode == "backward")
                subject, rare = f"{op.title}, {dtype}", rarely(dtype, op.dtypes)
                name = f"{subject}, {mode}"
                yield Check("norms and losses", name, run, rare=rare, subject=subject)
    for listed in LISTS:
        for dtype in listed.dtypes:
            run = partial(_list_op, listed, DTYPES[dtype])
            name, rare = f"{listed.name}, {dtype}", rarely(dtype, listed.dtypes)
            yield Check("lists of tensors", name, run, rare=rare)


def rarely(dtype: str, dtypes: Collection[str]) -> bool:
    """Whether a dtype is left to ``--all``: float16 beside bfloat16. O1 to O3 train in float16."""
    return dtype == "fp16" and "bf16" in dtypes


# --- on tensors -----------------------------------------------------------------------------------


def _op(op: Op, dtype: torch.dtype, backward: bool, setting: Setting) -> Iterator[Measured]:
    in_eps = op.in_eps.get(dtype)

    def error(x: torch.Tensor, exact: torch.Tensor) -> float:
        if in_eps is None:
            return tolerance.roundings(x, exact, truncated=setting.interpreted)
        return tolerance.errors_in_eps(x, exact, dtype)

    for shape in (*op.checked.small, *(op.checked.busy if setting.large else ())):
        inputs, size = op.inputs(shape, dtype, setting.device), "x".join(map(str, shape))
        found, again = (_results(op.ours, inputs, backward) for _ in range(2))
        exact, torchs = (
            _results(op.theirs, inputs, backward, to) for to in (torch.float64, torch.float32)
        )
        for name, one in found.items():
            allowed = tolerance.ROUNDINGS[one.dtype] if in_eps is None else in_eps
            if one.dtype == torch.float32:
                allowed = max(allowed, 2 * error(torchs[name], exact[name]))
            unit = "roundings" if in_eps is None else "eps"
            yield Measured(f"{name}, {size}", error(one, exact[name]), allowed, unit)
        yield same(f"second call, {size}", [*found.values()], [*again.values()])


def _results(
    function: Function, inputs: Inputs, backward: bool, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The output, or the gradients, by the names of the report."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs.leaves]
    y = function(*leaves, *inputs.rest)
    if not backward:
        return {"output": y.detach()}
    generator = torch.Generator("cpu").manual_seed(1)
    # Multiples of 1/8, which every dtype holds: the exact result starts from the same gradient.
    grad = torch.randint(-16, 17, y.shape, generator=generator, device="cpu").to(y) / 8
    if y.dim() == 0 and inputs.leaves[0].dtype == torch.float16:
        grad = grad * LOSS_SCALE
    found = torch.autograd.grad(y, leaves, grad)
    names = [f"gradient of {name}" for name in ("input", "weight", "bias")]
    return dict(zip(names, found, strict=False))


# --- on lists of tensors --------------------------------------------------------------------------


def tensors(setting: Setting, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """A list of awkward sizes, and of large tensors on a GPU."""
    shapes = (*SHAPES, *(LARGE if setting.large else ()))
    return [random(s, dtype, setting.device, seed=100 * seed + n) for n, s in enumerate(shapes)]


def _list_op(op: ListOp, dtype: torch.dtype, setting: Setting) -> Iterator[Measured]:
    lists = [tensors(setting, dtype, seed) for seed in range(op.lists)]
    flag = torch.zeros(1, dtype=torch.int32, device=setting.device)
    found, again = (op.ours(flag, *lists) for _ in range(2))
    exact = op.exact(*([x.double() for x in column] for column in lists))
    yield from one_rounding("output", zip(found.rounded, exact.rounded, strict=True), setting)
    for norm, wanted in zip(found.norms, exact.norms, strict=True):
        # Few numbers, each off by the additions of a sum.
        yield Measured("norm", tolerance.errors_in_eps(norm, wanted), tolerance.NORM, "eps")
    yield same("second call", [*found.rounded, *found.norms], [*again.rounded, *again.norms])
    yield Measured("flag, 0 expected", int(flag), 0, "off")
    for bad in (torch.inf, torch.nan) if op.flags else ():
        lists[-1][-1].view(-1)[-1] = bad
        flag.zero_()
        op.ours(flag, *lists)
        yield Measured("flag, 1 expected", 1 - int(flag), 0, "off")
