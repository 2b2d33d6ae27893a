"""Layer norm and RMS norm over the last dimensions, which make a row.

    layer norm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias,    var biased
    RMS norm:   y = x / sqrt(mean(x ** 2) + eps) * weight

All paths compute in float32 and round once. On a CPU float32 layer norm is PyTorch's own function,
which adds up the gradients of weight and bias row by row: they are 30 roundings off for 2,000 rows,
45 for 4,000. In 16 bits it would round each sum to 16 bits, so that it is called in float32.

Sources: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, eq. 3 and 4; Zhang and
Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. 4.
"""

# Annotations are no strings here: TorchScript would not find their names.

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from apex.ops._check import check_norm, refuse_other_dtype
from apex.ops._dtypes import NARROW, Optional, to_dtype, wide
from apex.ops._op import op
from apex.ops.norms import row_norm_pieces
from apex.ops.norms._scripted import Shape, left_to_python


def _definition(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Sequence[int],
    eps: float,
    centered: bool,
    dtype: torch.dtype,
    *_: Any,
) -> torch.Tensor:
    same = x.dtype == dtype and (weight is None or weight.dtype == dtype)
    if not same or (centered and x.is_cpu and dtype in NARROW):
        to = wide(x, weight)
        x, weight, bias = x.to(to), to_dtype(weight, to), to_dtype(bias, to)
    if centered:
        return F.layer_norm(x, list(shape), weight, bias, eps).to(dtype)
    return F.rms_norm(x, list(shape), weight, eps).to(dtype)


_ARGUMENTS = (
    "Tensor x, Tensor? weight, Tensor? bias, SymInt[] shape, float eps, bool centered, "
    "ScalarType dtype"
)
OP = op(
    f"row_norm({_ARGUMENTS}) -> (Tensor y, Tensor mean, Tensor rstd)",
    _definition,
    grads=("x", "weight", "bias"),
    kernel="row_norms",
    pieces=row_norm_pieces,
    autocast="half",
    compiles_to_operator=lambda x, weight, bias, shape, eps, centered, dtype: centered,
)
MEMORY_EFFICIENT = op(
    f"row_norm_from_output({_ARGUMENTS}, ScalarType x_dtype)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    _definition,
    grads=("x", "weight", "bias"),
    kernel="row_norms",
    saves=("y", "weight", "bias", "rstd"),
    pieces=row_norm_pieces,
    autocast="half",
)


def layer_norm(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Sequence[int],
    eps: float,
    *,
    memory_efficient: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Shift and scale each row to mean 0 and variance 1, then by ``weight`` and ``bias``.

    Args:
        x: ``(..., *shape)``, any floating dtype.
        weight: ``shape``, or ``None``.
        bias: ``shape``, or ``None``; of the weight's dtype.
        shape: The last dimensions of ``x``, which make a row.
        eps: Added to the variance.
        memory_efficient: Keep the output for the backward rather than the input, which can then be
            freed. Gradients are those of an input made again from the rounded output, where a
            weight smaller than ``eps`` counts as ``eps``.
        dtype: Of the output; by default that of ``x``. Under ``torch.autocast`` tensors are cast to
            its dtype first.

    Returns:
        ``(..., *shape)``.

    Raises:
        ArgumentError: What is passed does not fit together.
    """
    x, weight, bias = OP.cast(x, weight, bias)
    return _normalized(x, weight, bias, shape, eps, True, memory_efficient, dtype)


def rms_norm(
    x: torch.Tensor,
    weight: Optional,
    shape: Sequence[int],
    eps: float,
    *,
    memory_efficient: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Scale each row to a root mean square of 1, then by ``weight``; see :func:`layer_norm`."""
    x, weight = OP.cast(x, weight)
    return _normalized(x, weight, None, shape, eps, False, memory_efficient, dtype)


@left_to_python
def norm(
    x: torch.Tensor, weight: Optional, bias: Optional, shape: Shape, eps: float,
    memory_efficient: bool, centered: bool, weights: str, instead: str,
) -> torch.Tensor:  # fmt: skip
    """Layer norm, or RMS norm unless ``centered``, as Apex's functions and modules compute it.

    Args:
        x: As for :func:`layer_norm`; so are the next five.
        weight: As well.
        bias: As well.
        shape: As well.
        eps: As well.
        memory_efficient: As well.
        centered: Whether it is a layer norm.
        weights: Which dtypes of a weight fit, see `refuse_other_dtype`. The output has the
            weight's, but the input's with ``"float32"``.
        instead: What takes others, for the error.
    """
    x, weight, bias = OP.cast(x, weight, bias)
    refuse_other_dtype(x, weight, instead, weights)
    dtype = None if weight is None or weights == "float32" else weight.dtype
    return _normalized(x, weight, bias, shape, eps, centered, memory_efficient, dtype)


def _normalized(
    x: torch.Tensor, weight: Optional, bias: Optional, shape: Sequence[int], eps: float,
    centered: bool, memory_efficient: bool, dtype: torch.dtype | None,
) -> torch.Tensor:  # fmt: skip
    check_norm("layer_norm" if centered else "rms_norm", x, weight, bias, shape)
    dtype = dtype or x.dtype
    if memory_efficient:
        return MEMORY_EFFICIENT(x, weight, bias, shape, eps, centered, dtype, x.dtype)
    return OP(x, weight, bias, shape, eps, centered, dtype)
