"""Layer norm and RMS norm over the last dimensions, which make a row.

    layer norm: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias,    var biased
    RMS norm:   y = x / sqrt(mean(x ** 2) + eps) * weight

All paths compute in float32 and round once. On a CPU float32 layer norm is PyTorch's own function,
which adds up the gradients of weight and bias row by row: they are 30 roundings off for 2,000 rows,
45 for 4,000. In 16 bits it would round each sum to 16 bits, so that it is called in float32.

Sources: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, eq. 3 and 4; Zhang and
Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from apex.ops._check import check_norm
from apex.ops._dtypes import NARROW, Optional, to_dtype, wide
from apex.ops._op import op
from apex.ops.norms import row_norm_pieces

# Elements of the input from which on the kernel replaces PyTorch's. Not measured (there was no
# GPU) but derived from published medians of forward plus backward in bfloat16, 4096 wide, on a
# B200 (Liger-Kernel, benchmark/data/all_benchmark_data_cutile.csv): at 2**22 elements PyTorch takes
# 0.060 ms and a Triton autograd function 0.212 ms, nearly all of it Python; at 2**25 they take
# 0.264 and 0.218 ms. PyTorch's time is linear in between, about 0.03 ms + 7 ps an element, so that
# 0.1 ms, a guess at two launches forward and backward without the dispatcher in between, is reached
# near 2**23. RMS norm: H100 medians of the same collection agree (bfloat16, 4096 x 1024: 0.074
# against 0.300).
LEAST = 2**23


def layer_norm_reference(
    x: torch.Tensor, weight: Optional, bias: Optional, shape: Sequence[int], eps: float
) -> torch.Tensor:
    """Compute the definition in the dtype of ``x``: in float64, the oracle of the tests."""
    dims = tuple(range(-len(shape), 0))
    centered = x - x.mean(dims, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm_reference(
    x: torch.Tensor, weight: Optional, shape: Sequence[int], eps: float
) -> torch.Tensor:
    """Compute the definition in the dtype of ``x``: in float64, the oracle of the tests."""
    dims = tuple(range(-len(shape), 0))
    y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return y if weight is None else y * weight


def _definition(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Sequence[int],
    eps: float,
    centered: bool,
    dtype: torch.dtype,
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
    least=LEAST,
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
    check_norm("layer_norm", x, weight, bias, shape)
    if memory_efficient:
        return MEMORY_EFFICIENT(x, weight, bias, shape, eps, True, dtype or x.dtype, x.dtype)
    return OP(x, weight, bias, shape, eps, True, dtype or x.dtype)


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
    check_norm("rms_norm", x, weight, None, shape)
    if memory_efficient:
        return MEMORY_EFFICIENT(x, weight, None, shape, eps, False, dtype or x.dtype, x.dtype)
    return OP(x, weight, None, shape, eps, False, dtype or x.dtype)
