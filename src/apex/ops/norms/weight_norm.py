"""Weight normalization: ``w = g * v / ||v||``, with one norm for each index of one dimension.

Composed of torch's functions on every device: weights are small beside activations. 16-bit tensors
are computed in float32, forward and backward, and each result is rounded once. There is no epsilon:
where the norm is 0, ``w`` is nan.

Source: Salimans and Kingma, "Weight Normalization", arXiv:1602.07868, equation 2.
"""

from __future__ import annotations

import torch

from apex.ops._check import check_shape, check_tensors
from apex.ops._dtypes import wide


def norm_except(v: torch.Tensor, dim: int | None = 0) -> torch.Tensor:
    """Compute the 2-norms of ``v`` over all dimensions but one.

    Args:
        v: Any shape; float16, bfloat16, float32 or float64.
        dim: The dimension to keep, negative from the last one; None for a single norm.

    Returns:
        The shape of ``v`` with ones instead of the other dimensions; 0-dim with None. float64
        for float64, else float32.

    Raises:
        IndexError: ``v`` has no dimension ``dim``.
        ArgumentError: ``v`` is no tensor of these dtypes.
    """
    check_tensors("weight_norm", {"v": v}, floating=("v",))
    v = v.to(wide(v))
    norm: torch.Tensor
    if dim is None:
        norm = torch.linalg.vector_norm(v)
        return norm
    if not -v.dim() <= dim < v.dim():
        raise IndexError(
            f"weight_norm: dim was {dim} and v has shape {list(v.shape)}. Pass one of its "
            "dimensions, or None for the norm of the whole tensor."
        )
    others = [other for other in range(v.dim()) if other != dim % v.dim()]
    if not others:  # torch would take an empty list for all dimensions
        return v.abs()
    norm = torch.linalg.vector_norm(v, dim=others, keepdim=True)
    return norm


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int | None = 0) -> torch.Tensor:
    """Compute ``g * v / ||v||``.

    Args:
        v: Direction, any shape; float16, bfloat16, float32 or float64.
        g: Length, in the shape of :func:`norm_except`; of any of these dtypes.
        dim: As in :func:`norm_except`.

    Returns:
        Shape and dtype of ``v``. Can be differentiated any number of times.

    Raises:
        IndexError: ``v`` has no dimension ``dim``.
        ArgumentError: A dtype or device is not taken, or ``g`` has another shape.
    """
    check_tensors("weight_norm", {"v": v, "g": g}, floating=("v", "g"), required=("g",))
    to = wide(v, g)
    full = v.to(to)  # once: autograd rounds the gradient of each cast
    norm = norm_except(full, dim)
    check_shape("weight_norm", "g", g, norm.shape, f"v has {list(v.shape)}, dim is {dim}")
    return (full * (g.to(to) / norm)).to(v.dtype)
