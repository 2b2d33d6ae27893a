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

import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from apex.ops._by_row import by_row
from apex.ops._check import FLOATS, ArgumentError, check_shape, check_tensors, traced
from apex.ops._dtypes import NARROW, WIDE, Optional, to_dtype, wide
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
    row = list(shape)
    y = F.layer_norm(x, row, weight, bias, eps) if centered else F.rms_norm(x, row, weight, eps)
    return y if y.dtype == dtype else y.to(dtype)


def _torchs(
    x: torch.Tensor, weight: Any, bias: Any, shape: Any, eps: float, centered: bool
) -> torch.Tensor | None:
    """By the function that F.layer_norm or F.rms_norm calls, which checks sizes itself."""
    dtype = x.dtype
    if (weight is not None and weight.dtype is not dtype) or (
        bias is not None and (weight is None or bias.dtype is not dtype)
    ):
        return None
    if centered and (dtype in WIDE or (dtype in NARROW and not x.is_cpu)):
        return torch.layer_norm(x, shape, weight, bias, eps)
    if centered and dtype in NARROW:  # torch's would round sums of gradients
        weight = None if weight is None else weight.float()
        bias = None if bias is None else bias.float()
        return torch.layer_norm(x.float(), shape, weight, bias, eps).to(dtype)
    return torch.rms_norm(x, shape, weight, eps) if dtype in FLOATS else None


def _fitting(
    x: torch.Tensor, weight: Any, bias: Any, shape: Any, eps: float, centered: bool
) -> tuple[Any, ...] | None:
    row = shape if isinstance(shape, tuple) else tuple(shape) if isinstance(shape, list) else ()
    if not row or x.shape[-len(row) :] != row or (bias is not None and weight is None):
        return None
    for tensor in (weight, bias):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.shape != row):
            return None
    return x, weight, bias, shape, eps, centered, x.dtype


_ARGUMENTS = (
    "Tensor x, Tensor? weight, Tensor? bias, SymInt[] shape, float eps, bool centered, "
    "ScalarType dtype"
)
OP = op(
    f"row_norm({_ARGUMENTS}) -> (Tensor y, Tensor mean, Tensor rstd)",
    _definition,
    grads=("x", "weight", "bias"),
    kernel="row_norms",
    allocate=row_norm_pieces.allocate,
    pieces=row_norm_pieces,
    autocast="half",
    compiles_to_operator=lambda x, weight, bias, shape, eps, centered, dtype: centered,
    torchs=_torchs,
    fitting=_fitting,
)
MEMORY_EFFICIENT = op(
    f"row_norm_from_output({_ARGUMENTS}, ScalarType x_dtype)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    _definition,
    grads=("x", "weight", "bias"),
    kernel="row_norms",
    saves=("y", "weight", "bias", "rstd"),
    allocate=row_norm_pieces.allocate,
    pieces=row_norm_pieces,
    autocast="half",
    torchs=_torchs,
    fitting=lambda *given: (args := _fitting(*given)) and (*args, args[-1]),
)


def _invariant(x: torch.Tensor, weight: Optional, bias: Optional, *rest: Any) -> torch.Tensor:
    """The definition, of a row that is alone as well as of one among others.

    Torch splits a sum to a single number over its threads, from 32,768 numbers on.
    """
    if not rest[2] and x.numel() == math.prod(rest[0]):
        rows = torch.cat([x.reshape(1, *rest[0]), x.detach().reshape(1, *rest[0])])
        return _definition(rows, weight, bias, *rest)[0].view(x.shape)
    return _definition(x, weight, bias, *rest)


by_row(OP, _invariant)
by_row(
    MEMORY_EFFICIENT,
    _invariant,
    pieces=SimpleNamespace(
        forward=partial(row_norm_pieces.forward, by_row=True),
        backward=partial(row_norm_pieces.backward, by_row=True),
        above=0,
    ),
)


@left_to_python
def norm(
    x: torch.Tensor, weight: Optional, bias: Optional, shape: Shape, eps: float,
    memory_efficient: bool, centered: bool, weights: str, instead: str,
) -> torch.Tensor:  # fmt: skip
    """Layer norm, or RMS norm unless ``centered``, as Apex's functions and modules compute it.

    Under ``torch.autocast`` tensors are cast to its dtype first.

    Args:
        x: ``(..., *shape)``, any floating dtype.
        weight: ``shape``, or ``None``.
        bias: ``shape``, or ``None``; of the weight's dtype.
        shape: The last dimensions of ``x``, which make a row.
        eps: Added to the variance.
        memory_efficient: Keep the output for the backward rather than the input, which can then be
            freed. Gradients are those of an input made again from the rounded output, where a
            weight smaller than ``eps`` counts as ``eps``.
        centered: Whether it is a layer norm.
        weights: Which dtypes of a weight fit, see `refuse_other_dtype`. The output has the
            weight's, but the input's with ``"float32"``.
        instead: What takes others, for the error.

    Returns:
        ``(..., *shape)``.

    Raises:
        ArgumentError: What is passed does not fit together.
    """
    operation = MEMORY_EFFICIENT if memory_efficient else OP
    y = operation.usual(x, weight, bias, shape, eps, centered)
    if y is not None:
        return y
    x, weight, bias = OP.cast(x, weight, bias)
    refuse_other_dtype(x, weight, instead, weights)
    check_norm("layer_norm" if centered else "rms_norm", x, weight, bias, shape)
    dtype = x.dtype if weight is None or weights == "float32" else weight.dtype
    if memory_efficient:
        return MEMORY_EFFICIENT(x, weight, bias, shape, eps, centered, dtype, x.dtype)
    return OP(x, weight, bias, shape, eps, centered, dtype)


# -- what is refused -------------------------------------------------------------------------------

_SCALAR_TYPES = dict(zip(FLOATS, ("Half", "BFloat16", "Float", "Double"), strict=True))


def check_norm(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: Sequence[int],
) -> None:
    """Check the arguments of a norm over the last dimensions, with the words of torch.

    Raises:
        ArgumentError: They do not fit together.
    """
    if traced():
        return
    if isinstance(shape, int):
        raise ArgumentError(
            f"{name}: normalized_shape is {shape}, a number; pass the last dimensions of the "
            f"input: [{shape}]."
        )
    row = tuple(shape)
    if not row:
        raise ArgumentError(
            f"{name}: Expected normalized_shape to be at least 1-dimensional, i.e., containing at "
            "least one element, but got normalized_shape = ()"
        )
    if x.shape[-len(row) :] != row:
        raise ArgumentError(
            f"{name}: Given normalized_shape={list(row)}, expected input with shape "
            f"[{', '.join(['*', *map(str, row)])}], but got input of size{list(x.shape)}"
        )
    tensors = {"input": x, "weight": weight, "bias": bias}
    check_tensors(name, tensors, floating=tensors)
    for key, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != row:  # else the text would cost 1 us
            check_shape(name, key, tensor, row, f"normalized_shape is {list(row)}")
    if bias is not None and (weight is None or weight.dtype != bias.dtype):
        dtype = None if weight is None else weight.dtype
        raise ArgumentError(
            f"{name}: weight is {dtype} and bias {bias.dtype}; pass both in one dtype, or no bias."
        )


def refuse_other_dtype(
    x: torch.Tensor, weight: torch.Tensor | None, instead: str, weights: str = "same"
) -> None:
    """Refuse a weight of a dtype that does not fit the input's, in torch's words.

    What is no floating dtype at all is left to :func:`check_tensors`.

    Args:
        x: The input.
        weight: The weight, if there is one.
        instead: What takes it, for the error.
        weights: Which dtypes fit besides the input's: with ``"same"`` none; with ``"half"`` 16 bits
            beside a wider input; with ``"float32"`` that beside 16 bits; with ``"any"`` all.

    Raises:
        ArgumentError: The dtypes do not fit.
    """
    if weight is None or weight.dtype == x.dtype or weights == "any":
        return
    if weights == "half":
        fits = weight.dtype in NARROW and x.dtype not in NARROW
    else:
        fits = weights == "float32" and weight.dtype == torch.float32 and x.dtype in NARROW
    if not fits and {x.dtype, weight.dtype} <= {*FLOATS}:
        raise ArgumentError(
            f"expected scalar type {_SCALAR_TYPES[x.dtype]} but found "
            f"{_SCALAR_TYPES[weight.dtype]}: the input is {x.dtype} and the weight "
            f"{weight.dtype}. Use {instead}, whose output has the weight's dtype, or "
            "torch.autocast, or cast one of them."
        )
