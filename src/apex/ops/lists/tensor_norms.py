"""Norms of lists of tensors: one read of every element, float32 sums, nothing waits.

    square_sums[i] = sum((factor * x_i)^2)
    l2_norms[i]    = sqrt(square_sums[i])
    max_norms[i]   = max(|factor * x_i|)
    l2_norm        = sqrt(sum over all lists of square_sums)

Sums run in float32, always in the same order: a result is repeated bit for bit. A list may mix
dtypes and devices; what comes out is on the first tensor's device. Squares that exceed the largest
float32, of elements above 1.8e19, give inf.

(Layers that normalize activations are :mod:`apex.ops.norms`.)
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from apex.ops import _runtime
from apex.ops.lists.flat import flatten
from apex.ops.lists.multi_tensor import raise_flag, run
from apex.ops.lists.scale import GIVEN, MAGNITUDE, SCALE, SQUARE, ScaleScalars
from apex.ops.lists.tensor_lists import (
    Scalar,
    TensorList,
    flag_to_set,
    grouped,
    merged,
    numels_of,
    scalar_on,
)


def square_sums(
    column: TensorList, *, factor: Scalar = 1.0, flag: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum the squares of each tensor.

    Args:
        column: Tensors of any dtypes, devices and sizes.
        factor: What elements are multiplied by first; a one-element tensor is read on its device.
        flag: One-element tensor of any dtype; it becomes 1 if an element is not finite.

    Returns:
        float32 ``(tensors,)``.
    """
    return _each(SQUARE, column, factor, flag)


def l2_norms(
    column: TensorList, *, factor: Scalar = 1.0, flag: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the Euclidean norm of each tensor; as :func:`square_sums`."""
    return square_sums(column, factor=factor, flag=flag).sqrt()


def max_norms(
    column: TensorList, *, factor: Scalar = 1.0, flag: torch.Tensor | None = None
) -> torch.Tensor:
    """Find the largest magnitude in each tensor, 0 for an empty one; as :func:`square_sums`."""
    return _each(MAGNITUDE, column, factor, flag)


def l2_norm(
    column: TensorList, *, factor: Scalar = 1.0, flag: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the Euclidean norm of all elements together.

    Returns:
        float32, 0-dim; as :func:`square_sums` otherwise.
    """
    return square_sums(column, factor=factor, flag=flag).sum().sqrt()


@torch.no_grad()
def norms_of(
    sums: torch.Tensor, flag: torch.Tensor, *, each: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take roots of sums of squares: of all together, and of each.

    On a GPU one launch takes the place of nine of torch's.

    Args:
        sums: float32 ``(tensors,)``.
        flag: One element of any dtype, on their device; it becomes 1 if the first result is not
            finite.
        each: Whether the second is wanted.

    Returns:
        float32 ``(1,)``, and ``(tensors,)`` or ``(0,)``.
    """
    if _runtime.can_fuse(sums.device):
        from apex.kernels import partial_sums  # late: importing us must not import triton

        return partial_sums.norms_of(sums.contiguous(), flag, each=each)
    norm = sums.sum().sqrt().reshape(1)
    flag.masked_fill_(norm.isfinite().logical_not(), 1)
    return norm, sums.sqrt() if each else sums.new_empty(0)


@torch.no_grad()
def _each(what: int, column: TensorList, factor: Scalar, flag: torch.Tensor | None) -> torch.Tensor:
    """Sum squares of each tensor, or find its largest magnitude."""
    if not column:
        return torch.zeros(0, device="cpu", dtype=torch.float32)
    device = column[0].device
    parts = []
    for positions, (tensors,), dense in grouped([column]):
        here = tensors[0].device
        found = _of_one_kind(what, tensors, scalar_on(factor, here), flag, dense=dense)
        parts.append((positions, found.to(device, non_blocking=device.type != "cpu")))
    return merged(parts)


def _of_one_kind(
    what: int, tensors: TensorList, factor: Scalar, flag: torch.Tensor | None, *, dense: bool
) -> torch.Tensor:
    """As :func:`_each`, for tensors of one device and one dtype."""
    device = tensors[0].device
    if what == SQUARE and tensors[0].is_cpu and _runtime.forced() is None:
        found = _square_sums_on_cpu(tensors, float(factor))
        if flag is not None and not found.isfinite().all():  # finite squares may overflow the sum
            raise_flag(flag, tensors)
        return found
    with nullcontext() if flag is None else flag_to_set(flag, device) as mine:
        sums = run(
            SCALE, [tensors], (), ScaleScalars(factor), sums=(what,), flag=mine, flags=(GIVEN,),
            largest=what == MAGNITUDE, dense=dense,
        )  # fmt: skip
    assert sums is not None  # asked for
    return sums[0]


# -- torch's norm on a CPU -----------------------------------------------------------------------

# Elements whose norm torch computes at once. It keeps a running sum for each vector lane, which is
# at most 5.1e-7 off here, for equal elements; 1e-6 for 1,024 of them, 1.3e-5 for 16,384, and 7.6e-4
# for 2**24 random ones.
ROW = 512
PIECE = 2**17  # elements that are widened and scaled at a time, which stay in the cache


def _square_sums_on_cpu(tensors: TensorList, factor: float) -> torch.Tensor:
    """Sum squares in float64: of the elements of short tensors, of the norms of rows of long ones.

    1e7 float32 elements take 1.6 ms (torch's norm of the whole tensor 1.4, the definition some 10);
    1,000 tensors of 8 x 8 0.8 (torch's norms, stacked, 1.5; the definition 9); EPYC, one thread.
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    short, numels = tensors, numels_of(tensors)
    if max(numels) > ROW or tensors[0].dtype != wide or factor != 1.0:
        short = [_shortened(x, wide, factor) for x in tensors]
        numels = numels_of(short)
    lengths = torch.tensor(numels, device="cpu", dtype=torch.int64)
    squares = flatten(short).double().square()
    return torch.segment_reduce(squares, "sum", lengths=lengths, unsafe=True).float()


def _shortened(x: torch.Tensor, wide: torch.dtype, factor: float = 1.0) -> torch.Tensor:
    """At most ``ROW`` numbers with the norm of ``factor * x``."""
    is_long, parts = x.numel() > ROW, []
    for part in torch.split(x.reshape(-1), PIECE) if is_long else [x]:
        part = part if part.dtype == wide else part.to(wide)
        part = part if factor == 1.0 else part * factor
        if is_long:
            whole = part.numel() // ROW * ROW
            parts.append(torch.linalg.vector_norm(part[:whole].view(-1, ROW), dim=1))
            part = part[whole:]
        if part.numel() or not is_long:  # an empty view would keep its piece
            parts.append(part)
    return _shortened(torch.cat(parts), wide) if is_long else parts[0]
