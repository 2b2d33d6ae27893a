"""Softmax over the last dimension of attention scores, which are scaled and masked.

    z_j  = scale * x_j; -10000 where the mask is 1; -inf above the diagonal if causal
    y_j  = exp(z_j - max(z)) / sum_k exp(z_k - max(z)); 0 if a mask is given and max(z) <= -10000
    dx_j = scale * y_j * (dy_j - sum_k dy_k * y_k)

-10000 and the rows of zeros are those of NVIDIA's Megatron-LM and Apex. Kernels and pieces save
``y`` alone, in 16 bits if the input is: gradients are those of the rounded result. As in Apex,
``dx`` asks for no mask: a masked column has a gradient where it has a weight, if max(z) is below
about -9,900, and nan in a row of nan. Of few elements torch computes the gradients, before ``y`` is
rounded, and those of masked columns are 0.

Bytes an element that the kernels move, in 16 bits: 4 forward, a read and a write, and 6 backward;
3 and 4 if causal; a mask of all heads adds its byte over their number. Torch's ``softmax((x *
scale).masked_fill(mask, -10000), -1)`` moves 12, in three passes, and 14: 2.6 times
as many bytes. Instructions, which limit the kernels sooner on some GPUs: docs/kernels.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from apex._compat import private
from apex.ops import _runtime
from apex.ops._by_row import by_row
from apex.ops._check import FLOATS, ArgumentError, check_shape, check_tensors, traced
from apex.ops._dtypes import WIDE, Optional, wide
from apex.ops._op import call_on_device, op

MASKED = -10000.0
_MASKS = (torch.bool, torch.uint8)


def softmax(z: torch.Tensor, causal: bool, zeros: bool) -> torch.Tensor:
    """Softmax of logits; ``zeros``: whether a mask was given, so that empty rows become 0."""
    if causal:  # CPU: `masked_fill` takes three times as long as `tril` (4 x 128 x 128, float32)
        z = z.tril() + _above(z)
    y = torch.softmax(z, -1)
    # No columns have no largest; a size is a tensor while torch.jit.trace records.
    if zeros and (private.get_tracing_state() is not None or z.shape[-1]):
        y = y.masked_fill(z.amax(-1, keepdim=True) <= MASKED, 0.0)
    return y.tril() if causal else y  # a row of nan is 0 there, too


def _above(z: torch.Tensor, first: int = 0) -> torch.Tensor:
    """``-inf`` above the diagonal, where a causal row does not look, else 0."""
    return z.new_full(z.shape[-2:], -torch.inf).triu_(1 + first)


def _masked(mask: Optional) -> Optional:
    return mask if mask is None or mask.dtype == torch.bool else mask == 1


def reference(x: torch.Tensor, mask: Optional, scale: float, causal: bool) -> torch.Tensor:
    """Compute the definition; rounds once."""
    wider = x if x.dtype in WIDE else x.float()
    if mask is None and not causal:
        y = torch.softmax(wider * scale, -1)
    else:
        masked = _masked(mask)
        # CPU: 0.6 of masked_fill's time
        z = wider * scale if masked is None else torch.where(masked, MASKED, wider * scale)
        y = softmax(z, causal, mask is not None)
    return y if wider is x else y.to(x.dtype)


def gradient(dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> list[torch.Tensor]:
    """Compute the definition of the backward, from the result."""
    dx = _rows_gradient(dy.tril() if causal else dy, y, scale)
    return [dx.tril() if causal else dx]  # a row of nan is 0 there, too


def _rows_gradient(dy: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    to = wide(y)
    dx: torch.Tensor = private.softmax_backward_data(dy.to(to), y.to(to), -1, to)
    return dx.mul(scale).to(y.dtype)


# -- in pieces, on a CPU -------------------------------------------------------------------------

# What is between stays in the cache, and only the result is kept for the backward. 4096 x 4096, one
# thread of a busy EPYC, masked, forward and backward: 85 ms where torch's functions take 149 in
# float32, 74 for 111 in bfloat16. Up to SMALL elements the calls cost more than they save.
PIECE, SMALL = 2**18, 100_000  # elements


def _pieces(*tensors: Any) -> Iterator[tuple[int, Sequence[Any]]]:
    """The same rows of tensors that fit the first, or None: at most PIECE elements, or one row.

    Before them the number of the first row in its matrix.
    """
    first = tensors[0]
    height = max(1, PIECE // first[0].numel())
    if first.dim() > 2 and first[0].numel() > PIECE:
        for i in range(len(first)):
            yield from _pieces(*(None if t is None else t.expand(first.shape)[i] for t in tensors))
        return
    parts = [
        itertools.repeat(None) if t is None else t.expand(first.shape).split(height)
        for t in tensors
    ]
    for number, part in enumerate(zip(*parts, strict=False)):
        yield number * height if first.dim() == 2 else 0, part


def _forward(x: torch.Tensor, mask: Optional, scale: float, causal: bool) -> torch.Tensor:
    y, fill = x.new_empty(x.shape), x.new_full((), MASKED, dtype=wide(x))
    for row, (out, rows, masked) in _pieces(y, x, _masked(mask)):
        z = rows.to(wide(x))
        z = z * scale if z is rows else z.mul_(scale)
        if masked is not None:
            torch.where(masked, fill, z, out=z)
        if causal:
            z.tril_(row).add_(_above(z, row))
        wide_out = out if out.dtype == z.dtype else torch.empty_like(z)
        torch.softmax(z, -1, out=wide_out)
        if masked is not None:
            empty = z.amax(-1, keepdim=True) <= MASKED
            if empty.any():
                wide_out.masked_fill_(empty, 0.0)
        out.copy_(wide_out.tril_(row) if causal else wide_out)
    return y


def _backward(
    dy: torch.Tensor, needs: Sequence[bool], *, y: torch.Tensor, scale: float, causal: bool
) -> list[torch.Tensor]:
    dx = y.new_empty(y.shape)
    for _, (out, dy_rows, y_rows) in _pieces(dx, dy, y):
        out.copy_(_rows_gradient(dy_rows, y_rows, scale))
    # The result is 0 above the diagonal; only inf or nan times 0 makes a row, as a whole, nan.
    return gradient(dy, y, scale, causal) if causal and dx[..., 0].isnan().any() else [dx]


def _torchs(x: torch.Tensor, mask: Any, scale: float, causal: bool) -> torch.Tensor | None:
    """By the functions of :func:`reference`, which refuse what does not broadcast."""
    dims, dtype = x.dim(), x.dtype
    if dtype not in FLOATS or dims < 2:
        return None
    wider = x if dtype in WIDE else x.float()
    if causal:
        if mask is not None or x.shape[-2] != x.shape[-1]:
            return None
        # `alpha` scales: 0 + scale * x is rounded once, as the product alone.
        y = torch.softmax(torch.add(_above(wider), wider.tril(), alpha=scale), -1).tril()
    elif mask is None:
        y = torch.softmax(wider * scale, -1)
    else:
        if type(mask) is not torch.Tensor or not mask.dim() == dims <= 4:
            return None
        if mask.device != x.device:  # of meta, which torch would take
            return None
        if mask.dtype == torch.uint8:
            mask = mask == 1
        elif mask.dtype != torch.bool:
            return None
        z = (wider * scale).masked_fill_(mask, MASKED)
        y = torch.softmax(z, -1)
        largest = z.detach().amax(-1, keepdim=True)
        # CPU: 1.4 of the time if rows without a key are written where there is none (16 x 16).
        if not (x.is_cpu and largest.min().item() > MASKED):
            y = y.masked_fill(largest <= MASKED, 0.0)
    return y if dtype in WIDE else y.to(dtype)


def _fitting(x: torch.Tensor, mask: Optional, scale: float, causal: bool) -> Any:
    shape, dims = x.shape, x.dim()
    if dims < 2 or (causal and shape[-2] != shape[-1]):
        return None
    if mask is not None:
        if mask.dtype not in _MASKS or not mask.dim() == dims <= 4:
            return None
        for size, whole in zip(mask.shape, shape, strict=True):
            if size not in (1, whole):
                return None
    return x, mask, scale, causal


OP = op(
    "scaled_softmax(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor y",
    reference,
    grads=("x",),
    saves=("y",),
    gradient=gradient,
    pieces=SimpleNamespace(forward=_forward, backward=_backward, above=SMALL),
    autocast="half",
    contiguous=False,  # a mask is read as it lies in memory
    # The kernels count rows in 32 bits.
    takes=(lambda x: x.numel() < 2**30 * max(1, x.shape[-1]), 2**30),
    torchs=_torchs,
    fitting=_fitting,
)
by_row(OP, reference, pad_mask=True)


def scaled_softmax(
    x: torch.Tensor, mask: Optional, scale: float, causal: bool = False, *, name: str
) -> torch.Tensor:
    """Check the arguments for the function ``name`` and compute."""
    scale = float(scale)
    y = OP.usual(x, mask, scale, causal)
    if y is not None:
        return y
    check(name, x, mask, causal)
    return OP(x, mask, scale, causal)


def check(
    name: str, x: torch.Tensor, mask: Optional = None, causal: bool = False, key: str = "input"
) -> None:
    """Refuse what cannot be computed, without looking at any number on a device."""
    check_tensors(name, {key: x, "mask": mask}, floating=[key])
    if mask is not None and mask.dtype not in _MASKS:
        raise ArgumentError(
            f"{name}: mask is {mask.dtype}; pass torch.bool, or torch.uint8 in which 1 is masked."
        )
    if traced():
        return
    shape = list(x.shape)
    if len(shape) < 2:
        raise ArgumentError(f"{name}: {key} has shape {shape}; pass (..., queries, keys).")
    if causal and shape[-2] != shape[-1]:
        raise ArgumentError(
            f"{name}: {key} has shape {shape}; a causal softmax needs as many queries as keys. For "
            "other shapes pass a mask to scaled_masked_softmax."
        )
    if mask is not None and not _broadcasts(mask, x):
        wanted = [*shape[:-3], 1, *shape[-2:]] if len(shape) > 2 else shape
        raise ArgumentError(
            f"{name}: mask has shape {list(mask.shape)} and input {shape}. Pass {wanted}; any of "
            "the sizes may be 1. The input has at most 4 dimensions."
        )


def _broadcasts(mask: torch.Tensor, x: torch.Tensor) -> bool:
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    return mask.dim() <= x.dim() <= 4 and all(m in (1, n) for m, n in sizes)


def batches_per_block(keys: int) -> int:
    """Rows that a block of Apex's kernels took, which its rules about shapes ask for."""
    power = 1 << max(0, keys - 1).bit_length()
    return 128 // min(power, 32) * (2 if power <= 128 else 1)


# -- without autograd, for bare modules ----------------------------------------------------------


@torch.no_grad()
def forward(
    name: str, x: torch.Tensor, mask: Optional, scale: float, causal: bool = False
) -> torch.Tensor:
    """Check the arguments of ``name.forward`` and compute the result."""
    check(f"{name}.forward", x, mask, causal)
    y: torch.Tensor = OP.operator(x, mask, float(scale), causal)
    return y


@torch.no_grad()
def backward(
    name: str, dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool = False,
    in_place: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Check the arguments of ``name.backward``; compute the gradient of the input, over ``dy``."""
    name, tensors = f"{name}.backward", {"softmax_results": y, "output_grads": dy}
    check(name, y, None, causal, "softmax_results")
    check_tensors(name, tensors, floating=tensors, required=tensors)
    check_shape(name, "output_grads", dy, y.shape, f"softmax_results {list(y.shape)}")
    if dy.dtype != y.dtype:
        raise ArgumentError(
            f"{name}: output_grads are {dy.dtype} and softmax_results {y.dtype}; pass one dtype."
        )
    if in_place and _can_write_over(dy, y):
        kernels = OP.implementation(y)
        if kernels is not None:  # 6 bytes an element in 16 bits; a result and a copy move 10
            given = {"y": y, "scale": float(scale), "causal": causal}
            call_on_device(kernels.backward, dy, dy, (True,), **given, out=dy)
            torch.autograd.graph.increment_version(dy)  # as any function that writes
            return dy
    dx: torch.Tensor = OP.backward_operator(dy, [True], y, float(scale), causal)
    return dy.copy_(dx) if in_place else dx


def _can_write_over(dy: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether a kernel may write over ``dy``: plain, contiguous, and no graph is recorded."""
    plain = (
        type(dy) in _runtime.TENSOR_TYPES and type(y) in _runtime.TENSOR_TYPES and dy.numel() > 0
    )
    as_in_memory = dy.is_contiguous() and not dy.is_neg() and not y.is_neg()
    return plain and as_in_memory and not (_runtime.recorded() or _runtime.transformed())
