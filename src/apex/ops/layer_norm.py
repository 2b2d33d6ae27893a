"""Layer norm over the last dimensions.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias,    var biased

``reference`` is the definition and, in float64, the oracle of the tests. All paths compute in
float32 and round once. On a CPU float32 is PyTorch's own function: with rows added up one after the
other its gradients of weight and bias are 30 roundings off for 2,000 rows, 45 for 4,000. In 16 bits
it would round each sum to 16 bits, so that it is called in float32, or `norm_pieces` is.

Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, eq. 3 and 4.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from apex.ops import norm_pieces
from apex.ops._check import check_norm
from apex.ops._dtypes import NARROW, Optional, to_dtype, wide
from apex.ops._op import op

# Elements of the input from which on the kernel replaces PyTorch's. Not measured here (no GPU was
# at hand) but derived from published medians of forward plus backward in bfloat16, 4096 wide, on a
# B200 (Liger-Kernel, benchmark/data/all_benchmark_data_cutile.csv): at 2**22 elements PyTorch takes
# 0.060 ms and a Triton autograd function 0.212 ms, nearly all of it Python; at 2**25 they take
# 0.264 and 0.218 ms. PyTorch's time is linear in between, about 0.03 ms + 7 ps an element, so that
# 0.1 ms, a guess at two launches forward and backward without the dispatcher in between, is reached
# near 2**23. RMS norm: H100 medians of the same collection agree (bfloat16, 4096 x 1024: 0.074
# against 0.300).
LEAST = 2**23


def reference(
    x: torch.Tensor, weight: Optional, bias: Optional, shape: Sequence[int], eps: float
) -> torch.Tensor:
    """Compute the definition in the dtype of ``x``."""
    dims = tuple(range(-len(shape), 0))
    centered = x - x.mean(dims, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _definition(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Sequence[int],
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    same = x.dtype == dtype and (weight is None or weight.dtype == dtype)
    if not same or (x.is_cpu and dtype in NARROW):
        to = wide(x, weight)
        x, weight, bias = x.to(to), to_dtype(weight, to), to_dtype(bias, to)
    return F.layer_norm(x, list(shape), weight, bias, eps).to(dtype)


_PIECES = {
    "allocate": norm_pieces.allocate_layer_norm,
    "forward": norm_pieces.layer_norm,
    "backward": functools.partial(norm_pieces.backward, centered=True),
}
_ARGUMENTS = "Tensor x, Tensor? weight, Tensor? bias, SymInt[] shape, float eps, ScalarType dtype"
_RESULTS = "(Tensor y, Tensor mean, Tensor rstd)"

OP = op(
    f"layer_norm({_ARGUMENTS}) -> {_RESULTS}",
    _definition,
    grads=("x", "weight", "bias"),
    least=LEAST,
    pieces=SimpleNamespace(**_PIECES, pays=norm_pieces.pays_in_16_bits),
    autocast="half",
)
MEMORY_EFFICIENT = op(
    f"layer_norm_from_output({_ARGUMENTS}, ScalarType x_dtype) -> {_RESULTS}",
    _definition,
    grads=("x", "weight", "bias"),
    kernel="layer_norm",
    saves=("y", "weight", "bias", "rstd"),
    pieces=SimpleNamespace(**_PIECES),
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
            freed. Gradients are those of an input made again from the rounded output.
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
        return MEMORY_EFFICIENT(x, weight, bias, shape, eps, dtype or x.dtype, x.dtype)
    return OP(x, weight, bias, shape, eps, dtype or x.dtype)
