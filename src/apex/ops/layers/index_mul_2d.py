"""``y = in1[index] * in2``: every row of ``in2`` times the row of ``in1`` that its index names.

``din2 = dy * in1[index]``, and a row of ``din1`` is the sum of ``dy * in2`` over the rows with its
index, in their order and in float32 for 16 bits; one rounding each. Rows are sorted by index for
that, so that there are no atomic additions and every run has the same bits.

Bytes an element of ``in2`` in 16 bits: torch's gather and product move 10 forward and 14 backward,
the kernels 6 and 10, or 4 and 8 where the rows of ``in1`` stay in the cache (torch 8 and 14). Both
sort for the backward. One program adds up all rows with an index: a few indices with most of the
rows make the backward slow.

An index that is no row of ``in1`` is an ``IndexError`` on a CPU, and so is a negative one. On a GPU
the host cannot know without waiting: from the kernel the rows of ``y`` and ``din2`` are nan and the
row adds to no sum, PyTorch's own function stops with an assertion on the device. Nothing is read
out of bounds.
"""

from typing import Any

import torch

from apex.ops import _runtime
from apex.ops._check import INTEGERS, ArgumentError, check_shape, check_tensors, traced
from apex.ops._dtypes import WIDE
from apex.ops._op import op
from apex.ops.norms._scripted import left_to_python


def reference(in2: torch.Tensor, in1: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The definition, for tensors of one dtype; rounds once, gradients too."""
    # Not in1[index]: it takes negative indices, and on a CPU it is up to 2.6 times slower.
    if in2.dtype in WIDE:
        return torch.embedding(in1, index.long()) * in2
    return (torch.embedding(in1.float(), index.long()) * in2.float()).to(in2.dtype)


def _torchs(in2: torch.Tensor, in1: Any, index: Any) -> torch.Tensor | None:
    """By functions that check devices and numbers of rows."""
    dtype = in2.dtype
    if dtype not in WIDE or in1.dtype != dtype or in2.dim() != 2 or index.dtype != torch.int64:
        return None
    rows = torch.embedding(in1, index)
    return rows * in2 if rows.shape == in2.shape else None


def _fitting(
    in2: torch.Tensor, in1: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, ...] | None:
    fits = in1.dim() == in2.dim() == 2 and in1.dtype == in2.dtype and index.dtype in INTEGERS
    if not fits or in1.shape[1:] != in2.shape[1:] or index.shape != in2.shape[:1] or not len(in1):
        return None
    return in2, in1, index


OP = op(
    "index_mul_2d(Tensor in2, Tensor in1, Tensor index) -> Tensor y",
    reference,
    grads=("in2", "in1"),
    torchs=_torchs,
    fitting=_fitting,
)


@left_to_python
def index_mul_2d(in1: torch.Tensor, in2: torch.Tensor, idx1: torch.Tensor) -> torch.Tensor:
    """Compute ``in1[idx1] * in2`` for two matrices.

    Gradients are added up in a fixed order, so every run computes the same bits. You can
    differentiate it twice.

    Args:
        in1: ``(M, D)``, in any floating dtype.
        in2: ``(N, D)``, in any floating dtype.
        idx1: Integers ``(N,)``: the numbers of rows of ``in1``, from 0 to M - 1.

    Returns:
        ``(N, D)``, in the dtype that torch promotes both to, rounded once.

    Raises:
        ArgumentError: An argument has an unsupported type, dtype, shape or device. It is a
            RuntimeError, TypeError and ValueError.
        IndexError: An index is out of range or negative, on a CPU. On a GPU the row is NaN, or
            torch's own function stops with a device-side assertion.

    Example:
        >>> in1, in2 = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(3, 2)
        >>> index_mul_2d(in1, in2, torch.tensor([1, 0, 1]))
        tensor([[3., 4.],
                [1., 2.],
                [3., 4.]])
    """
    y = OP.usual(in2, in1, idx1)
    if y is not None:
        return y
    check("index_mul_2d", in1, in2, idx1)
    if in1.dtype != in2.dtype:
        dtype = torch.promote_types(in1.dtype, in2.dtype)
        in1, in2 = in1.to(dtype), in2.to(dtype)
    try:
        return OP(in2, in1, idx1)
    except (IndexError, RuntimeError):  # PyTorch's says neither which row nor what is allowed
        check_index("index_mul_2d", in1, idx1)
        raise


def check(name: str, in1: torch.Tensor, in2: torch.Tensor, index: torch.Tensor) -> None:
    """Refuse what cannot be computed, without looking at any number on a device."""
    factors = {"in1": in1, "in2": in2}
    tensors = factors | {"idx1": index}
    check_tensors(name, tensors, floating=factors, integers=["idx1"], required=tensors)
    if traced():
        return
    if in1.dim() != 2 or in2.dim() != 2 or in1.shape[1] != in2.shape[1]:
        raise ArgumentError(
            f"{name}: in1 has shape {list(in1.shape)} and in2 {list(in2.shape)}. Pass two matrices "
            "with the same number of columns."
        )
    if not len(in1) and len(in2):
        raise ArgumentError(f"{name}: in1 of shape {list(in1.shape)} has no rows.")
    check_shape(name, "idx1", index, in2.shape[:1], f"in2 has {list(in2.shape)}")


def check_index(name: str, in1: torch.Tensor, index: torch.Tensor) -> None:
    """Raise ``IndexError`` if an index on a CPU is no row of ``in1``; no other is looked at."""
    if not index.is_cpu or _runtime.transformed():  # vmap: another for each, which no `if` takes
        return
    index, rows = index.long(), in1.shape[0]
    bad = (index < 0) | (index >= rows)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise IndexError(f"{name}: idx1[{row}] is {int(index[row])}; allowed are 0 to {rows - 1}.")
