"""SwiGLU: ``y = silu(gate) * up`` with ``silu(x) = x * sigmoid(x)``.

Noam Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, equation 5, of the two products
with the weights. One read of both inputs and one write; torch's two functions move a third tensor
out and in again, and round it to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from apex._compat import private
from apex.ops._by_row import by_row
from apex.ops._check import check_shape, check_tensors
from apex.ops._dtypes import NARROW, WIDE, wide
from apex.ops._op import op

_silu: Callable[[torch.Tensor], torch.Tensor] = private.silu  # what F.silu calls
_product = torch.mul  # 0.14 us less than `*`


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The definition, for tensors of one dtype; rounds once."""
    to = wide(gate)
    return (F.silu(gate.to(to)) * up.to(to)).to(gate.dtype)


def _torchs(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
    dtype, shape = gate.dtype, gate.shape
    # Torch would broadcast, and take a number on another device.
    if up.dtype is not dtype or up.shape != shape or not shape:
        return None
    if dtype in WIDE:
        return _product(_silu(gate), up)
    return (_silu(gate.float()) * up.float()).to(dtype) if dtype in NARROW else None


def _fitting(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    return (gate, up) if up.dtype == gate.dtype and up.shape == gate.shape else None


OP = op(
    "swiglu(Tensor gate, Tensor up) -> Tensor y",
    reference,
    grads=("gate", "up"),
    autocast="half",
    compiles_to_operator=lambda *args: False,
    torchs=_torchs,
    fitting=_fitting,
)


# -- under batch_invariant, on a CPU ---------------------------------------------------------------

# Torch's silu and sigmoid have a second formula for what is left at the end of a vector, or of what
# a thread takes: up to 31 elements of float32, of which one in 26 gets other bits. `exp` has none.
PIECE = 2**18  # elements, so that float32 copies stay in a CPU's cache


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    small = x.abs().neg_().exp_()  # at most 1: exp(-x) overflows below -88
    return torch.where(x >= 0, 1.0, small).div_(small.add_(1.0))


def _split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.view(-1), PIECE)


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Parts of tensors, widened."""
    for parts in zip(*map(_split, tensors), strict=True):
        yield tuple(part.to(wide(part)) for part in parts)


def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(gate)
    for out, (g, u) in zip(_split(y), _pieces(gate, up), strict=True):
        out.copy_(_sigmoid(g).mul_(g).mul_(u))
    return y


def _backward(
    dy: torch.Tensor, needs: Sequence[bool], *, gate: torch.Tensor, up: torch.Tensor
) -> list[torch.Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    outs = map(_split, (dgate, dup))
    for of_gate, of_up, (d, g, u) in zip(*outs, _pieces(dy, gate, up), strict=True):
        sigmoid = _sigmoid(g)
        silu = sigmoid * g
        of_up.copy_(silu * d)
        slope = silu.mul_(1.0 - sigmoid).add_(sigmoid)
        of_gate.copy_(slope.mul_(u).mul_(d))
    return [dgate, dup]


def _invariant(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The definition by `exp`, for float64 and gradients of gradients.

    No clamp: its gradient where ``x`` is the bound is 1 with torch 2.13, and 0 with torch 2.14.
    """
    x = gate.to(wide(gate))
    is_negative = x < 0
    small = torch.where(is_negative, x, 0.0).exp()
    other = torch.where(is_negative, 0.0, -x).exp()
    sigmoid = torch.where(is_negative, small / (1.0 + small), 1.0 / (1.0 + other))
    return (x * sigmoid * up.to(x.dtype)).to(gate.dtype)


by_row(OP, _invariant, pieces=SimpleNamespace(forward=_forward, backward=_backward, above=0))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute SwiGLU, ``silu(gate) * up`` with ``silu(x) = x * sigmoid(x)``, in one kernel.

    The backward pass is one kernel too. Both compute in float32, or in float64 if a tensor is
    float64, and round once. Under ``torch.autocast`` both tensors are cast to its dtype.

    Source: Shazeer, arXiv:2002.05202, equation 5, where ``gate`` is ``x @ W`` and ``up`` is
    ``x @ V``.

    Args:
        gate: Tensor of any shape, in float16, bfloat16, float32 or float64.
        up: Tensor of the same shape and device, in any of these dtypes.

    Returns:
        Tensor of the same shape, in the dtype that torch promotes both to.

    Raises:
        ArgumentError: An argument is not a floating tensor, or the shapes or devices differ. It is
            a RuntimeError, TypeError and ValueError.

    Example:
        >>> gate, up = torch.nn.Linear(64, 2 * 128)(torch.randn(3, 64)).chunk(2, dim=-1)
        >>> apex.mlp.swiglu(gate, up).shape
        torch.Size([3, 128])
    """
    y = OP.usual(gate, up)
    if y is not None:
        return y
    tensors = {"gate": gate, "up": up}
    check_tensors("swiglu", tensors, floating=tensors, required=tensors)
    if up.shape != gate.shape:
        check_shape("swiglu", "up", up, gate.shape, f"gate has {list(gate.shape)}")
    if gate.dtype != up.dtype:
        dtype = torch.promote_types(gate.dtype, up.dtype)
        gate, up = gate.to(dtype), up.to(dtype)
    return OP(gate, up)
