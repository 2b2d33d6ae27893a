"""Group normalization with an optional SiLU behind it.

    x_hat = (x - mean) / sqrt(var + eps)      over each group's channels and all pixels of an image
    z     = x_hat * weight + bias
    y     = z * sigmoid(z), or z

Statistics are float32 (float64 for float64), ``y`` has the dtype of ``x`` and is rounded once.
Weight and bias may have other dtypes than ``x``. Source: Wu and He, arXiv:1803.08494.

Who computes: for images with their channels last in memory, a Triton kernel on a GPU if they are
large enough; on a CPU torch's kernels, in float32 for 16-bit images: its own 16-bit functions
round what lies between norm and activation, and keep statistics in 16 bits: off by up to twice the
rounding error, and by a seventh of the largest gradient in groups of two numbers. Images with
channels first are torch's on every other device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from apex.ops import _runtime
from apex.ops._library import batched, define, ordinary, tracing
from apex.ops._rows import without_autocast
from apex.ops._thresholds import SMALLEST, SMALLEST_ON_CPU

NARROW = (torch.float16, torch.bfloat16)
FUSABLE = (torch.float32, *NARROW)
ACTIVATIONS = {None: False, "": False, "silu": True, "swish": True}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

Optional = torch.Tensor | None


def reference(
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, silu: bool
) -> torch.Tensor:
    """Compute the definition in the dtype of ``x``, with torch's functions."""
    # What F.group_norm calls: without its question about sizes, which torch.jit.trace warns of.
    y = torch.group_norm(x, groups, weight, bias, eps, torch.backends.cudnn.enabled)
    return F.silu(y, inplace=not (y.requires_grad or tracing())) if silu else y


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    act: str | None = None,
) -> torch.Tensor:
    """Normalize each group of channels.

    Args:
        x: ``(images, channels, ...)``, any floating dtype.
        groups: Into how many the channels are divided evenly.
        weight: ``(channels,)`` or ``None``.
        bias: ``(channels,)`` or ``None``.
        eps: Added to the variance.
        act: ``"silu"`` or ``"swish"``, which are the same, or ``None`` or ``""``.

    Returns:
        Like ``x``; channels stay last in memory if they are.

    Raises:
        TypeError: A dtype is not floating.
        ValueError: A shape, a device or ``act`` is not what it should be.
    """
    groups, eps = int(groups), float(eps)
    if act not in ACTIVATIONS:
        raise ValueError(f"group_norm: act is {act!r}; allowed are 'silu', 'swish', '' and None.")
    silu = ACTIVATIONS[act]
    if tracing():
        return reference(x, groups, weight, bias, eps, silu)
    check(x, groups, weight, bias)
    if not x.numel():
        return _of_nothing(x, weight, bias)
    if _fused(x, weight, bias):
        y: torch.Tensor = FPROP(x, groups, weight, bias, eps, silu)[0]
        return y
    with without_autocast(x.device):  # which would make torch's output float32, ours with SiLU not
        return _plain(x, groups, weight, bias, eps, silu)


def channels_last(x: torch.Tensor) -> bool:
    """Whether the channels of an image are next to each other in memory."""
    if torch._C._are_functorch_transforms_active():
        return False  # vmap does not answer
    return x.dim() in FORMATS and x.is_contiguous(memory_format=FORMATS[x.dim()])


def check(x: torch.Tensor, groups: int, weight: Optional, bias: Optional) -> None:
    """Refuse what cannot be computed."""
    if x.dim() < 2 or groups < 1 or x.shape[1] % groups:
        raise ValueError(
            f"group_norm: input has shape {tuple(x.shape)} and there are {groups} groups. "
            "Pass (images, channels, ...) with channels that the groups divide evenly."
        )
    for name, tensor in (("input", x), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise TypeError(f"group_norm: {name} is {tensor.dtype}; pass a floating dtype.")
        if tensor.device != x.device:
            raise ValueError(
                f"group_norm: input is on {x.device} and {name} on {tensor.device}. "
                "Move all to one."
            )
        if tensor is not x and tensor.shape != x.shape[1:2]:
            raise ValueError(
                f"group_norm: {name} has shape {tuple(tensor.shape)} and the input "
                f"{x.shape[1]} channels. Pass ({x.shape[1]},)."
            )


def _fused(x: torch.Tensor, weight: Optional, bias: Optional) -> bool:
    """Whether to call our operation rather than torch's functions."""
    if not channels_last(x) or (weight is None) != (bias is None):
        return False
    if any(t is not None and t.dtype not in FUSABLE for t in (x, weight, bias)):
        return False
    if torch.compiler.is_compiling():
        return x.is_cuda  # on the CPU the compiler fuses torch's functions
    if not ordinary(x, weight, bias):
        return False
    forced = _runtime.forced()
    if forced is not None or not x.is_cuda:
        return forced == "triton"
    return x.numel() >= SMALLEST["group_norm"] and _runtime.can_fuse(x.device)


def _plain(
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, silu: bool
) -> torch.Tensor:
    last = channels_last(x)
    if _fails_with_channels_last(x, weight, bias, last):
        if x.numel() >= SMALLEST_ON_CPU["group_norm"] and _on_host_runs(x, weight, bias):
            return _on_host(x, groups, weight, bias, eps, silu)
        x = x.contiguous()
    if _as_it_is(x, weight, bias, silu, last):
        y = reference(x, groups, weight, bias, eps, silu)
    elif _needs_statistics_alone(x, weight, bias, silu, last):
        # Beside float32 weights torch keeps float32 statistics, without a copy of the image.
        ones = x.new_ones(x.shape[1], dtype=torch.float32) if weight is None else weight.float()
        y = reference(x, groups, ones, _to(bias, torch.float32), eps, silu)
    else:
        # With the original's kernel any pair of dtypes worked, and results were rounded once.
        to = _wide(x, weight, bias)
        y = reference(x.to(to), groups, _to(weight, to), _to(bias, to), eps, silu).to(x.dtype)
    return y.contiguous(memory_format=FORMATS[x.dim()]) if last else y


def _fails_with_channels_last(
    x: torch.Tensor, weight: Optional, bias: Optional, last: bool
) -> bool:
    """Whether torch's functions do: forward-mode derivatives, and what :class:`_OnHost` tells."""
    compiling = torch.compiler.is_compiling()
    if not compiling and not ordinary(x, weight, bias):
        return True
    recorded = last and x.device.type == "cpu" and _recorded(x, weight, bias)
    return recorded and not (compiling and x.requires_grad)  # all gradients are compiled together


def _on_host_runs(x: torch.Tensor, weight: Optional, bias: Optional) -> bool:
    return not torch.compiler.is_compiling() and ordinary(x, weight, bias)


def _as_it_is(x: torch.Tensor, weight: Optional, bias: Optional, silu: bool, last: bool) -> bool:
    """Whether torch's functions take these tensors, and are as exact as ours are to be."""
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in (weight, bias)):
        return False
    if x.dtype not in NARROW or (not last and x.device.type != "cpu"):
        return True
    # Forward alone they round once, and take half as long as with copies in float32.
    return not silu and not _recorded(x, weight, bias) and x.device.type == "cpu"


def _recorded(*tensors: Optional) -> bool:
    """Whether gradients will be wanted."""
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def _needs_statistics_alone(
    x: torch.Tensor, weight: Optional, bias: Optional, silu: bool, last: bool
) -> bool:
    """Whether torch's backward would do but for the mean and deviation, kept in 16 bits.

    They are off by more than the numbers are apart in a group of a few that are nearly equal.
    """
    return (
        x.dtype in NARROW
        and x.device.type == "cpu"
        and not silu
        and not last
        and _wide(weight, bias) == torch.float32
        and not torch.compiler.is_compiling()
        and ordinary(x, weight, bias)
    )


def _of_nothing(x: torch.Tensor, *weights: Optional) -> torch.Tensor:
    """No pixel: gradients of weights are 0 where torch's of images without pixels are nan."""
    y = x.clone()
    for tensor in weights:
        if tensor is not None:
            y = y * tensor.to(x.dtype).view(-1, *[1] * (x.dim() - 2))
    return y


def _wide(*tensors: Optional) -> torch.dtype:
    """In what is computed: float32, or float64 if a tensor is."""
    double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def _to(tensor: Optional, dtype: torch.dtype) -> Optional:
    return None if tensor is None else tensor.to(dtype)


def _contiguous(tensor: Optional) -> Optional:
    return None if tensor is None else tensor.contiguous()


# -- as operations of torch ----------------------------------------------------------------------


def _fprop(
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y`` and float32 ``(images, groups, 2)``: mean and reciprocal deviation."""
    x = _nhwc(x)
    if _kernel_runs(x, weight, bias):
        from apex.kernels import group_norm as kernels  # late: it imports triton

        weight, bias = _contiguous(weight), _contiguous(bias)
        return kernels.forward(x, groups, weight, bias, eps, silu)
    to = torch.promote_types(x.dtype, torch.float32)
    y, mean, rstd = torch.native_group_norm(
        x.to(to), _to(weight, to), _to(bias, to), *_sizes(x), groups, eps
    )
    y = F.silu(y) if silu else y
    return y.to(x.dtype).contiguous(memory_format=_format(x)), torch.stack([mean, rstd], -1)


def _bprop(
    dy: torch.Tensor,
    stats: torch.Tensor,
    x: torch.Tensor,
    groups: int,
    weight: Optional,
    bias: Optional,
    eps: float,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``x``, ``weight`` and ``bias``; the latter are empty if there are none."""
    x, dy = _nhwc(x), _nhwc(dy)
    like = x if weight is None else weight
    if _kernel_runs(x, weight, bias):
        from apex.kernels import group_norm as kernels

        weight, bias = _contiguous(weight), _contiguous(bias)
        dx, sums = kernels.backward(dy, stats.contiguous(), x, groups, weight, bias, silu)
        dbias, dweight = sums.to(like.dtype)
    else:
        to = torch.promote_types(x.dtype, torch.float32)
        gain, shift = _to(weight, to), _to(bias, to)
        wide, slope = x.to(to), dy.to(to)
        if silu:
            z = torch.native_group_norm(wide, gain, shift, *_sizes(x), groups, eps)[0]
            slope = torch.ops.aten.silu_backward(slope, z)
        mean, rstd = (t.contiguous() for t in stats.to(to).unbind(-1))
        mask = [True, weight is not None, weight is not None]
        dx, dweight, dbias = torch.ops.aten.native_group_norm_backward(
            slope, wide, mean, rstd, gain, *_sizes(x), groups, mask
        )
        dx = dx.to(x.dtype).contiguous(memory_format=_format(x))
    if weight is None:
        return dx, x.new_empty(0), x.new_empty(0)
    return dx, dweight.to(like.dtype).clone(), dbias.to(like.dtype).clone()


def _kernel_runs(x: torch.Tensor, *weights: Optional) -> bool:
    given = [x, *(t for t in weights if t is not None)]
    both = len(given) != 2
    return (
        both
        and x.numel() > 0
        and all(t.dtype in FUSABLE for t in given)
        and (_runtime.can_fuse(x.device))
    )


def _sizes(x: torch.Tensor) -> tuple[int, int, int]:
    images, channels = x.shape[:2]
    return images, channels, x.shape[2:].numel()


def _format(x: torch.Tensor) -> torch.memory_format:
    return FORMATS.get(x.dim(), torch.contiguous_format)


def _nhwc(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=_format(x))


def _fprop_fake(x: torch.Tensor, groups: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    to = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x, memory_format=_format(x))
    return y, x.new_empty(x.shape[0], groups, 2, dtype=to)


def _bprop_fake(
    dy: torch.Tensor, stats: torch.Tensor, x: torch.Tensor, groups: int, weight: Optional, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    like = x if weight is None else weight
    shape = x.shape[1:2] if weight is not None else (0,)
    dx = torch.empty_like(x, memory_format=_format(x))
    return dx, like.new_empty(shape), like.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, ctx.groups, weight, bias, ctx.eps, ctx.silu = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, output[1])


def _gradients(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, bias, stats = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        return _again(ctx, dy, x, weight, bias)
    found = BPROP(dy, stats, x, ctx.groups, weight, bias, ctx.eps, ctx.silu)
    needs = [ctx.needs_input_grad[place] for place in (0, 2, 3)]
    dx, dweight, dbias = (t if need else None for t, need in zip(found, needs, strict=True))
    return dx, None, dweight, dbias, None, None


def _again(
    ctx: Any, dy: torch.Tensor, x: torch.Tensor, weight: Optional, bias: Optional
) -> tuple[Any, ...]:
    """Gradients by torch's functions with channels first: under vmap, and differentiable."""
    needs = [ctx.needs_input_grad[place] for place in (0, 2, 3)]
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        y = _plain(x.contiguous(), ctx.groups, weight, bias, ctx.eps, ctx.silu)
        given = zip((x, weight, bias), needs, strict=True)
        wanted = [t for t, need in given if need and t is not None]
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=create))
    dx, dweight, dbias = (next(found) if need else None for need in needs)
    return dx, None, dweight, dbias, None, None


def _on_host(*arguments: Any) -> torch.Tensor:
    y: torch.Tensor = _OnHost.apply(*arguments)  # type: ignore[no-untyped-call]
    return y


class _OnHost(torch.autograd.Function):
    """Channels last on a CPU: torch's kernels, and always all gradients.

    Where those of weights are wanted and the input's is not, torch 2.13 writes it through a null
    pointer; under vmap its own autograd refuses channels last.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        groups: int,
        weight: Optional,
        bias: Optional,
        eps: float,
        silu: bool,
    ) -> torch.Tensor:
        to = _wide(x, weight, bias)
        z, mean, rstd = torch.native_group_norm(
            x.to(to), _to(weight, to), _to(bias, to), *_sizes(x), groups, eps
        )
        z = z.contiguous(memory_format=_format(x))
        ctx.save_for_backward(x, weight, bias, mean, rstd, z if silu else None)
        ctx.groups, ctx.eps, ctx.silu = groups, eps, silu
        return (F.silu(z) if silu else z).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, rstd, z = ctx.saved_tensors
        if torch.is_grad_enabled() or batched(dy):
            return _again(ctx, dy, x, weight, bias)
        slope = _nhwc(dy.to(mean.dtype))
        if z is not None:
            slope = torch.ops.aten.silu_backward(slope, z)
        mask = [True, *ctx.needs_input_grad[2:4]]
        found = torch.ops.aten.native_group_norm_backward(
            slope, x.to(mean.dtype), mean, rstd, _to(weight, mean.dtype), *_sizes(x), ctx.groups,
            mask,
        )  # fmt: skip
        dx, dweight, dbias = (
            t.to(like.dtype) if need else None
            for t, like, need in zip(found, (x, weight, bias), mask, strict=True)
        )
        return dx, None, dweight, dbias, None, None


_OF = "int groups, Tensor? weight, Tensor? bias, float eps, bool silu"
BPROP = define(
    f"group_norm_nhwc_bprop(Tensor grad, Tensor stats, Tensor x, {_OF})"
    " -> (Tensor x, Tensor weight, Tensor bias)",
    _bprop,
    _bprop_fake,
)
FPROP = define(
    f"group_norm_nhwc_fprop(Tensor x, {_OF}) -> (Tensor y, Tensor stats)",
    _fprop,
    _fprop_fake,
    keep=_keep,
    backward=_gradients,
)
