"""Old name of NVIDIA's Apex: ``in1[idx1] * in2`` and its first and second derivatives.

A module of compiled Apex. Arguments are positional only; results are written into tensors of the
caller, whatever was in them. Any device and floating dtype: ``float_`` and ``half_`` functions are
the same.
"""

import torch

from apex.ops._check import check_shape, check_tensors
from apex.ops._dtypes import wide
from apex.ops.layers.index_mul_2d import OP, check, check_index

__all__ = [
    "float_backward",
    "float_backward_backward",
    "float_forward",
    "half_backward",
    "half_backward_backward",
    "half_forward",
]

Tensor = torch.Tensor


@torch.no_grad()
def float_forward(out: Tensor, in1: Tensor, in2: Tensor, idx1: Tensor, /) -> None:
    """Write ``in1[idx1] * in2`` into ``out``."""
    _check("forward", in1, in2, idx1, of_in2={"out": out})
    out.copy_(OP.operator(in2, in1, idx1))


@torch.no_grad()
def float_backward(
    grad_in1: Tensor, grad_in2: Tensor, grad_out: Tensor, in1: Tensor, in2: Tensor, idx1: Tensor, /
) -> None:
    """Write the gradients of ``in1`` and ``in2``."""
    of_in2 = {"grad_in2": grad_in2, "grad_out": grad_out}
    _check("backward", in1, in2, idx1, of_in2=of_in2, of_in1={"grad_in1": grad_in1})
    for grad, found in zip(
        (grad_in2, grad_in1), OP.backward_operator(grad_out, [True, True], in2, in1, idx1),
        strict=True,
    ):  # fmt: skip
        grad.copy_(found)


@torch.no_grad()
def float_backward_backward(
    grad_grad_out: Tensor, grad_in1: Tensor, grad_in2: Tensor, grad_out: Tensor,
    grad_grad_in1: Tensor, grad_grad_in2: Tensor, in1: Tensor, in2: Tensor, idx1: Tensor, /,
) -> None:  # fmt: skip
    """Write the gradients of ``grad_out``, ``in1`` and ``in2``, given those of both gradients."""
    of_in1 = {"grad_in1": grad_in1, "grad_grad_in1": grad_grad_in1}
    of_in2 = {
        "grad_grad_out": grad_grad_out, "grad_in2": grad_in2, "grad_out": grad_out,
        "grad_grad_in2": grad_grad_in2,
    }  # fmt: skip
    _check("backward_backward", in1, in2, idx1, of_in2=of_in2, of_in1=of_in1)
    to = wide(in2)  # the sum of two products is rounded once
    pairs = ((in2, grad_grad_in1), (grad_grad_in2, in1))
    one, other = (OP.operator(x.to(to), rows.to(to), idx1) for x, rows in pairs)
    # Both gradients are linear in (in2, in1), so that their derivatives are the same function.
    given = (grad_grad_in2, grad_grad_in1, idx1)
    found = OP.backward_operator(grad_out, [True, True], *given)
    for grad, value in zip((grad_grad_out, grad_in2, grad_in1), (one + other, *found), strict=True):
        grad.copy_(value)


def _check(
    name: str, in1: Tensor, in2: Tensor, idx1: Tensor, *, of_in2: dict[str, Tensor],
    of_in1: dict[str, Tensor] | None = None,
) -> None:  # fmt: skip
    name, tensors = f"fused_index_mul_2d.{name}", of_in2 | (of_in1 or {})
    check(name, in1, in2, idx1)
    check_index(name, in1, idx1)
    check_tensors(name, {"in1": in1} | tensors, floating=tensors, required=tensors)
    for key, tensor in tensors.items():
        like = "in2" if key in of_in2 else "in1"
        shape = (in2 if key in of_in2 else in1).shape
        check_shape(name, key, tensor, shape, f"{like} has {list(shape)}")


half_forward = float_forward
half_backward = float_backward
half_backward_backward = float_backward_backward
