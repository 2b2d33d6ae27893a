"""Group norm with an optional SiLU behind it.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias,    var biased
    y = y * sigmoid(y)                                         with SiLU

Mean and variance are those of a group of channels and all pixels of an image.

All paths compute in float32, SiLU too, and round once; weight and bias may have other dtypes than
``x``. The kernel is for images whose channels are last in memory; others are PyTorch's on a GPU as
well.

On a CPU an operator of PyTorch computes the norm. Its gradient for channels last writes through a
null pointer where that of ``x`` is not wanted (seen in torch 2.13), and it has no forward-mode
derivative: the definition copies to channels first. `_PIECES` call the operator and its gradient
themselves and ask for that of ``x`` always, without copies: 8 times as fast for float32 with
channels last, 4 times for 16 bits, as the operator keeps float32 statistics beside float32 weights
(4 x 256 x 64 x 64, forward and backward, one core of an EPYC). Its gradient of 16 bits with
channels last is slow: that is computed in float32, of a few images at a time. Without a graph the
operator alone runs.

Source: Wu and He, "Group Normalization", arXiv:1803.08494, eq. 1 to 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from apex._compat import private
from apex.ops import _runtime
from apex.ops._check import FLOATS, ArgumentError, check_shape, check_tensors, traced
from apex.ops._dtypes import NARROW, WIDE, Optional, to_dtype, wide
from apex.ops._op import op

_is_transformed = private.are_functorch_transforms_active
ACTIVATIONS = {None: False, "": False, "silu": True, "swish": True}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(x: torch.Tensor) -> bool:
    """Whether images lie in memory with their channels last, without gaps."""
    return x.dim() in FORMATS and x.is_contiguous(memory_format=FORMATS[x.dim()])


def _layout(x: torch.Tensor) -> torch.memory_format:
    """Of the result: channels last where the channels of ``x`` are, gaps or not."""
    if private.are_functorch_transforms_active():
        return torch.preserve_format  # vmap knows no other
    last = x.dim() in FORMATS and x.stride(1) == 1 and not x.is_contiguous()
    return FORMATS[x.dim()] if last else torch.contiguous_format


def _like(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.to(dtype=x.dtype, memory_format=_layout(x))


def _definition(
    x: torch.Tensor, weight: Optional, bias: Optional, groups: int, eps: float, silu: bool
) -> torch.Tensor:
    if not _runtime.transformed() and _is_empty(x):
        return _of_no_pixel(x, weight, bias)
    to = wide(x, weight, bias)
    if silu:
        return _like(F.silu(OP(x.to(to), weight, bias, groups, eps, False)), x)
    if weight is None and bias is not None:  # PyTorch has no gradient for a bias alone
        weight = torch.ones_like(bias, requires_grad=False)
    # What F.group_norm calls, without its check of sizes, which jit.trace warns of.
    y = torch.group_norm(
        x.to(to).contiguous(), groups, to_dtype(weight, to), to_dtype(bias, to), eps
    )
    return _like(y, x)


def _is_empty(x: torch.Tensor) -> bool:
    if torch.compiler.is_compiling():  # an unknown size, as of x[mask], counts as another than 0
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy

        return guard_or_false(x.numel() == 0)
    return x.numel() == 0


def _of_no_pixel(x: torch.Tensor, *weights: Optional) -> torch.Tensor:
    """Gradients of weights are 0 where PyTorch's of images without pixels are nan."""
    y, shape = x.clone(), (-1, *[1] * (x.dim() - 2))
    for weight in weights:
        y = y if weight is None else y * weight.view(shape).to(y.dtype)
    return y


def _allocate(
    x: torch.Tensor, weight: Optional, bias: Optional, groups: int, eps: float, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y``, and mean and ``1 / sqrt(var + eps)`` of each group, float32 or for float64 float64."""
    y = torch.empty_like(x, memory_format=_layout(x))
    return y, x.new_empty((x.shape[0], groups, 2), dtype=wide(x))


# -- PyTorch's operator, and its gradient with that of the input ----------------------------------


def _serves(
    x: torch.Tensor, weight: Optional, bias: Optional, groups: int, eps: float, silu: bool
) -> bool:
    return not silu and (x.dtype in NARROW or _is_taken(x))


def _is_taken(x: torch.Tensor) -> bool:
    """Whether PyTorch's kernel on a CPU takes channels last: strides of sizes of 1 mislead it."""
    image = x.shape[1:]
    return channels_last(x) and 1 not in image and x.stride(0) == image.numel()


def _arguments(
    x: torch.Tensor, weight: Optional, bias: Optional, silu: bool
) -> tuple[list[Any], tuple[int, int, int]]:
    to, (images, channels, *pixels) = wide(x, weight, bias), x.shape
    x = x if x.is_cpu and _is_taken(x) else x.contiguous()
    if silu or not x.is_cpu:  # on a CPU the kernel widens by itself
        x = x.to(to)
    weight = (x.new_ones(channels) if weight is None else weight).to(to)
    bias = to_dtype(bias, to)
    bias = None if bias is None else bias.contiguous()  # torch reads them as if they were
    return [x, weight.contiguous(), bias], (images, channels, math.prod(pixels))


def _forward(
    x: torch.Tensor, weight: Optional, bias: Optional, groups: int, eps: float, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    y, mean, rstd = _normalized(x, weight, bias, groups, eps, silu)
    return _like(F.silu(y) if silu else y, x), torch.stack([mean, rstd], -1).to(wide(x))


def _normalized(
    x: torch.Tensor, weight: Optional, bias: Optional, groups: int, eps: float, silu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm, mean and ``1 / sqrt(var + eps)``; in float32 if a SiLU follows."""
    (image, gain, shift), sizes = _arguments(x, weight, bias, silu)
    return torch.native_group_norm(image, gain, shift, *sizes, groups, eps)


def _backward(
    dy: torch.Tensor, needs: Sequence[bool], *, x: torch.Tensor, weight: Optional, bias: Optional,
    stats: torch.Tensor, groups: int, eps: float, silu: bool,
) -> list[Optional]:  # fmt: skip
    (image, gain, shift), sizes = _arguments(x, weight, bias, silu)
    mean, rstd = (t.to(gain.dtype).contiguous() for t in stats.unbind(-1))
    rest = (mean, rstd, gain, groups, [True, *needs[1:]])
    if image.dtype in NARROW and not image.is_contiguous():
        dx, *found = _widened_gradients(dy, image, *rest)
    else:
        slope = dy.to(image.dtype)
        if slope.stride() != image.stride():
            slope = torch.empty_like(image).copy_(slope)
        if silu:
            z = torch.native_group_norm(image, gain, shift, *sizes, groups, eps)[0]
            slope = torch.ops.aten.silu_backward(slope, z)
        dx, *found = _gradients(slope, image, *rest)
    pairs = zip(found, (weight, bias), strict=True)
    return [_like(dx, x), *(g if g is None or p is None else g.to(p.dtype) for g, p in pairs)]


def _gradients(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, gain: torch.Tensor,
    groups: int, needs: list[bool],
) -> Sequence[Any]:  # fmt: skip
    images, channels, *pixels = x.shape
    found: Sequence[Any] = torch.ops.aten.native_group_norm_backward(
        dy, x, mean, rstd, gain, images, channels, math.prod(pixels), groups, needs
    )
    return found


def _widened_gradients(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, gain: torch.Tensor,
    groups: int, needs: list[bool],
) -> Sequence[Any]:  # fmt: skip
    """The same in float32, of some images at a time, so that the copies stay in the cache."""
    dx, sums, height = torch.empty_like(x), [], max(1, _PIECE // x[0].numel())
    for start in range(0, len(x), height):
        some = slice(start, start + height)
        image = x[some].float()
        slope = torch.empty_like(image).copy_(dy[some])
        dx[some], *found = _gradients(slope, image, mean[some], rstd[some], gain, groups, needs)
        sums.append(found)
    each = zip(*sums, strict=True)
    return [dx, *(None if parts[0] is None else torch.stack(parts).sum(0) for parts in each)]


# Elements of images of 16 bits with channels last that are widened at a time in the backward.
# Torch's kernel of 16 bits takes 2.8, 1.7 and 3.6 times as long for 2 x 128 x 32 x 32,
# 4 x 256 x 64 x 64 and 16 x 64 x 64 x 64 (bfloat16, one thread of a Xeon with avx512_bf16).
_PIECE = 2**18
# Up to this many elements the calls cost more than they save. Their time over the definition's,
# forward and backward, one core of an EPYC, in float32 with channels last, bfloat16, and bfloat16
# with channels last: 2 x 64 x 16 x 16 1.4, 1.5, 2.7; 2 x 128 x 32 x 32 0.5, 0.8, 1.0.
_PIECES = SimpleNamespace(forward=_forward, backward=_backward, above=2**17, serves=_serves)

# -- what public calls ask first -------------------------------------------------------------------


def _torchs(
    x: torch.Tensor, weight: Any, bias: Any, groups: int, eps: float, silu: bool
) -> torch.Tensor | None:
    """By functions that check sizes themselves, of tensors of one dtype."""
    dtype = x.dtype
    if (
        (weight is not None and weight.dtype is not dtype)
        or (bias is not None and (weight is None or bias.dtype is not dtype))
        or not x.numel()
    ):
        return None
    if dtype in WIDE and x.is_contiguous():
        y = torch.group_norm(x, groups, weight, bias, eps)
        return private.silu(y) if silu else y  # what F.silu calls
    if dtype not in FLOATS:
        return None
    last = not x.is_contiguous()
    if last and (
        _is_transformed()  # vmap knows no memory format
        or not channels_last(x)
        or (x.is_cpu and x.numel() > _PIECES.above)  # `_PIECES` compute it in the definition
    ):
        return None
    # Copies, as a GPU's function makes too: for a CPU's gradient see the top of this file.
    z = x.to(wide(x), memory_format=torch.contiguous_format) if last else x.float()
    if dtype in NARROW:
        weight = None if weight is None else weight.float()
        bias = None if bias is None else bias.float()
    y = torch.group_norm(z, groups, weight, bias, eps)
    layout = FORMATS[x.dim()] if last else torch.contiguous_format
    if last and (silu or dtype in WIDE):  # the gradient of SiLU would read the other layout across
        y = y.contiguous(memory_format=layout)
    y = private.silu(y) if silu else y
    if dtype in WIDE:
        return y
    return y.to(dtype, memory_format=layout) if last else y.to(dtype)


def _fitting(
    x: torch.Tensor, weight: Any, bias: Any, groups: Any, eps: float, silu: bool
) -> tuple[Any, ...] | None:
    if type(groups) is not int or groups < 1 or x.dim() < 2 or x.shape[1] % groups:
        return None
    for tensor in (weight, bias):
        if tensor is not None and (tensor.dtype not in FLOATS or tensor.shape != x.shape[1:2]):
            return None
    return x, weight, bias, groups, float(eps), silu


OP = op(
    "group_norm(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, bool silu) -> "
    "(Tensor y, Tensor stats)",
    _definition,
    grads=("x", "weight", "bias"),
    allocate=_allocate,
    pieces=_PIECES,
    contiguous=False,
    takes=(channels_last, 0),
    torchs=_torchs,
    fitting=_fitting,
)


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: Optional = None,
    bias: Optional = None,
    *,
    eps: float = 1e-5,
    act: str | None = None,
) -> torch.Tensor:
    """Shift and scale each group of channels to mean 0 and variance 1, then by weight and bias.

    Args:
        x: ``(images, channels, ...)``, any floating dtype.
        groups: Into how many the channels are divided evenly.
        weight: ``(channels,)`` or ``None``.
        bias: ``(channels,)`` or ``None``.
        eps: Added to the variance.
        act: ``"silu"`` or ``"swish"``, which are the same, or ``None`` or ``""``.

    Returns:
        Like ``x``, under ``torch.autocast`` too; channels stay last in memory if they are.

    Raises:
        ArgumentError: What is passed does not fit together.
    """
    silu = ACTIVATIONS.get(act)
    if silu is None:
        raise ArgumentError(
            f"group_norm: act is {act!r}; allowed are 'silu', 'swish', '' and None."
        )
    y = OP.usual(x, weight, bias, groups, eps, silu)
    if y is not None:
        return y
    groups = int(groups)
    check("group_norm", x, groups, weight, bias)
    return OP(x, weight, bias, groups, float(eps), silu)


def check(name: str, x: torch.Tensor, groups: int, weight: Optional, bias: Optional) -> None:
    """Check the arguments of group norm.

    Raises:
        ArgumentError: What is passed does not fit together.
    """
    if traced():
        return
    tensors = {"input": x, "weight": weight, "bias": bias}
    check_tensors(name, tensors, floating=tensors)
    if x.dim() < 2 or groups < 1 or x.shape[1] % groups:
        raise ArgumentError(
            f"{name}: input has shape {list(x.shape)} and there are {groups} groups. Pass (images, "
            "channels, ...) with a number of channels that is divisible by the number of groups."
        )
    channels = x.shape[1]
    for key, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != (channels,):
            check_shape(name, key, tensor, (channels,), f"input has {channels} channels")
