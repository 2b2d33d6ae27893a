"""``index_mul_2d``: gather and product in one kernel each way."""

import torch

from apex.ops.layers import index_mul_2d as ops
from apex.ops.norms._scripted import left_to_python

__all__ = ["index_mul_2d"]


@left_to_python
def index_mul_2d(in1: torch.Tensor, in2: torch.Tensor, idx1: torch.Tensor) -> torch.Tensor:
    """Compute ``in1[idx1] * in2`` for two matrices.

    Gradients are added up in a fixed order, so every run has the same bits; gradients of gradients
    work. How, and what happens to an index out of range on a GPU:
    :mod:`apex.ops.layers.index_mul_2d`.

    Args:
        in1: ``(M, D)``, any floating dtype.
        in2: ``(N, D)``, any floating dtype.
        idx1: ``(N,)``, numbers of rows of ``in1``, any integer dtype; negative ones are refused.

    Returns:
        ``(N, D)``, in the dtype that torch promotes both to, rounded once.

    Raises:
        ArgumentError: A type, dtype, shape or device is not what it should be; it is a
            RuntimeError, TypeError and ValueError.
        IndexError: An index is out of range or negative, on a CPU. On a GPU that row is nan, or
            torch's own function stops with an assertion there.

    Example:
        >>> in1, in2 = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(3, 2)
        >>> index_mul_2d(in1, in2, torch.tensor([1, 0, 1]))
        tensor([[3., 4.],
                [1., 2.],
                [3., 4.]])
    """
    return ops.index_mul_2d(in1, in2, idx1)
