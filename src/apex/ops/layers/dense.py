"""Dense layers ``y = activation(x @ weight.T + bias)``: PyTorch's products, forward and backward.

No Triton kernel. Products are cuBLAS's, and cuBLASLt adds the bias before it writes them. What is
left moves the activations six times: read and written in the forward; ``y`` and ``dy`` read and
``dz`` written in the backward; ``dz`` read once more for the gradient of the bias. A kernel for the
activation and the bias gradient would save the last read: one pass of six, 17 %, and less of all
bytes, because the products move them too. ``torch.compile`` fuses it.

Memory: for the backward one tensor for each layer is kept, two around a GELU, whose gradient is a
function of its input, and the next layer's of its result.

Autocast: inputs and parameters are cast to its dtype, float64 excepted, and the output has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from apex import _compat
from apex._compat import private
from apex.ops import _runtime
from apex.ops._check import FLOATS, ArgumentError, check_shape, check_tensors, traced
from apex.ops._dtypes import Optional

_tracing_state = private.get_tracing_state


def gelu_dense(
    x: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor,
    weight2: torch.Tensor,
    bias2: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two dense layers with GELU in between, in its tanh form.

    Returns:
        ``y``, and what its backward needs: the product before the GELU and the GELU's result.
    """
    hidden = F.linear(x, weight1, bias1)
    activated = F.gelu(hidden, approximate="tanh")
    return F.linear(activated, weight2, bias2), hidden, activated


def gelu_dense_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    hidden: torch.Tensor,
    activated: torch.Tensor,
) -> list[torch.Tensor]:
    """Gradients of ``x``, ``weight1``, ``bias1``, ``weight2`` and ``bias2``."""
    grad, *second = linear_backward(dy, activated, weight2)
    grad = torch.ops.aten.gelu_backward(grad, hidden, approximate="tanh")
    return [*linear_backward(grad, x, weight1), *second]


def linear_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``x``, the weight and the bias."""
    return input_gradient(dy, weight), rows(dy).t() @ rows(x), rows(dy).sum(0)


def input_gradient(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute ``dy @ weight`` as a product of matrices.

    Of a transposed 3-D ``dy`` and a weight that requires no gradient torch makes a batch, with a
    copy of the weight for each index of the first dimension.
    """
    return (rows(dy) @ weight).view(*dy.shape[:-1], weight.shape[1])


def rows(x: torch.Tensor) -> torch.Tensor:
    """View, or copy, a tensor of any rank as a matrix with the same last dimension."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x[None]


# Rows of a sum that are added to at a time where copies are needed. On a CPU 1,024 to 8,192 rows
# take 0.6 to 0.95 of the time of all 32,768 at once (1,024 terms, bfloat16).
SLICE = 4096


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a.T @ b``: in float32 for 16 bits, to which a product would be rounded first.

    CUDA does so in one call from torch 2.10 on. Else there are temporaries in float32: with torch
    2.9 on CUDA the product, for ``SLICE`` rows of ``total`` at a time; on a CPU and on ROCm ``b``,
    and ``SLICE`` columns of ``a`` at a time.
    """
    on_cuda = a.is_cuda and not torch.version.hip
    if a.dtype == total.dtype:
        total.addmm_(a.t(), b)
    elif on_cuda and _compat.IS_2_10:
        _compat.add_wide_product(total, a.t(), b)
    else:
        # In linear_cross_entropy, in bfloat16 on a CPU with instructions for it, a call takes 1.06
        # of PyTorch's time (2,048 rows, 32,768 classes), 0.68 with rounding.
        b = b if on_cuda else b.to(total.dtype)
        slices = (torch.split(tensor, SLICE) for tensor in (total, a.t()))
        for some, part in zip(*slices, strict=True):
            if on_cuda:
                some.add_(torch.mm(part, b, out_dtype=total.dtype))
            else:
                some.addmm_(part.to(total.dtype), b)


@contextlib.contextmanager
def alone(x: object) -> Iterator[None]:
    """Turn autograd and autocast off in a ``with`` block: compiled modules knew neither."""
    device = x.device.type if isinstance(x, torch.Tensor) else "cpu"
    with torch.no_grad(), _runtime.without_autocast(device):
        yield


# -- what is refused -------------------------------------------------------------------------------


def left_to_torch(weight: torch.Tensor, bias: Optional) -> bool:
    """Whether ``F.linear`` refuses whatever :func:`check` would say about one layer.

    It takes weights of one dimension, on meta, of integers and complex numbers; and biases of one
    element, or of another dtype where the input is not contiguous.
    """
    dtype = weight.dtype
    if dtype not in FLOATS or weight.dim() != 2 or weight.is_meta:
        return False
    if bias is None:
        return True
    if bias.dtype is not dtype or bias.dim() != 1:
        return False
    size = bias.numel()  # torch takes 1 whatever the weight is; 40 ns, where two shapes take 150
    return type(size) is int and (size != 1 or weight.shape[0] == 1)  # jit.trace: a tensor


def fit(x: torch.Tensor, weight: torch.Tensor, bias: Optional) -> bool:
    """Whether :func:`check` has nothing to say about a layer of plain tensors: the usual case.

    In one frame of Python; `check` takes ten.
    """
    plain = _runtime.TENSOR_TYPES
    if type(x) not in plain or type(weight) not in plain or _tracing_state() is not None:
        return False
    dtype, device, shape = x.dtype, x.device, weight.shape  # each takes 0.1 us
    if len(shape) != 2 or not x.dim():
        return False
    return (
        weight.dtype == dtype
        and weight.device == device
        and dtype in FLOATS
        and x.shape[-1] == shape[1]
        and (
            bias is None
            or (
                type(bias) in plain
                and bias.dtype == dtype
                and bias.device == device
                and bias.shape == (shape[0],)
            )
        )
    )


def check(
    name: str,
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    biases: Mapping[str, Optional],
) -> None:
    """Check the arguments of dense layers, of which each takes the output of the one before.

    Args:
        name: Of the function or module, for the error.
        x: ``(..., features)``.
        weights: By name, each ``(out, in)``.
        biases: By name, each ``(out,)`` or ``None``; as many.

    Raises:
        ArgumentError: They do not fit together.
    """
    tensors = {"input": x, **weights, **biases}
    check_tensors(name, tensors, floating=tensors, required=weights)
    check_one_dtype(name, tensors)
    if traced():
        return
    before, shape = "input", x.shape
    for (key, weight), (bias_key, bias) in zip(weights.items(), biases.items(), strict=True):
        if not shape or weight.dim() != 2 or weight.shape[1] != shape[-1]:
            raise ArgumentError(
                f"{name}: {before} has shape {list(shape)} and {key} {list(weight.shape)}. Pass "
                "(..., in_features) and (out_features, in_features)."
            )
        check_shape(name, bias_key, bias, weight.shape[:1], f"{key} has {list(weight.shape)}")
        before, shape = f"the output of {key}", torch.Size([*shape[:-1], weight.shape[0]])


def check_one_dtype(name: str, tensors: Mapping[str, Optional]) -> None:
    """Check that tensors have one dtype, or will have it under autocast.

    Raises:
        ArgumentError: Dtypes differ.
    """
    given = {key: t for key, t in tensors.items() if t is not None}
    dtypes = {t.dtype for t in given.values()}
    if len(dtypes) == 1:
        return
    on = any(_runtime.autocasts(t.device.type) for t in given.values())
    if on and torch.float64 not in dtypes:
        return
    found = ", ".join(f"{key} {t.dtype}" for key, t in given.items())
    instead = "" if on else ", or call it under torch.autocast"
    raise ArgumentError(f"{name}: {found}. Pass one floating dtype for all{instead}.")
