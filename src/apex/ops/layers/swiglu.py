"""SwiGLU: ``y = silu(gate) * up`` with ``silu(x) = x * sigmoid(x)``.

Noam Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, equation 5, of the two products
with the weights. One read of both inputs and one write; torch's two functions move a third tensor
out and in again, and round it to 16 bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from apex.ops import _runtime
from apex.ops._check import FLOATS, check_shape, check_tensors
from apex.ops._dtypes import WIDE, wide
from apex.ops._op import UNSURE, op


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The definition, for tensors of one dtype; rounds once."""
    to = wide(gate)
    return (F.silu(gate.to(to)) * up.to(to)).to(gate.dtype)


OP = op(
    "swiglu(Tensor gate, Tensor up) -> Tensor y",
    reference,
    grads=("gate", "up"),
    autocast="half",
    compiles_to_operator=lambda *args: False,
)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Check the arguments, bring them to one dtype and compute."""
    implementation = OP.choose(gate)
    if (
        implementation is not UNSURE
        and type(up) in _runtime.PLAIN
        and up.dtype == gate.dtype
        and up.device == gate.device
        and up.shape == gate.shape
        and gate.dtype in FLOATS
    ):
        if implementation is not None:
            return OP.compute(gate, up, (implementation,))
        # What F.silu calls.
        return torch._C._nn.silu(gate) * up if gate.dtype in WIDE else reference(gate, up)
    tensors = {"gate": gate, "up": up}
    check_tensors("swiglu", tensors, floating=tensors, required=tensors)
    if up.shape != gate.shape:
        check_shape("swiglu", "up", up, gate.shape, f"gate has {list(gate.shape)}")
    if gate.dtype != up.dtype:
        dtype = torch.promote_types(gate.dtype, up.dtype)
        gate, up = gate.to(dtype), up.to(dtype)
    return OP(gate, up)
