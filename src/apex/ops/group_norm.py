"""Group normalization with an optional SiLU behind it.

    x_hat = (x - mean) / sqrt(var + eps)      over each group's channels and all pixels of an image
    z     = x_hat * weight + bias
    y     = z * sigmoid(z), or z

Statistics are float32 (float64 for float64), ``y`` has the dtype of ``x`` and is rounded once.
Weight and bias may have other dtypes than ``x``. Source: Wu and He, arXiv:1803.08494.

Who computes: for images with their channels last in memory, a Triton kernel on a GPU if they are
large enough; images with channels first are torch's there. On a CPU it is torch's kernels always:

* as torch calls them where that is exact and safe: float32 with channels first, and what needs no
  gradients. A call costs as much as ``F.group_norm``'s, since torch checks what it is passed.
* 16 bits: statistics are float32, and SiLU is of float32. Torch's own functions round between norm
  and activation, and keep statistics in 16 bits: off by up to twice the rounding error, and by a
  seventh of the largest gradient in groups of two numbers. With SiLU that costs casts: 1.2 times
  torch's time forward and 1.7 backward, in bfloat16 with channels first.
* channels last with gradients: an autograd function, see :class:`_OnHost`, or for small images and
  groups of few channels, where torch's kernel is slow, copies to channels first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from apex.ops import _runtime
from apex.ops._dtypes import NARROW, to_dtype, wide
from apex.ops._library import batched, define, ordinary, tracing, wants_gradients
from apex.ops._runtime import without_autocast
from apex.ops._thresholds import SMALLEST, SMALLEST_ON_CPU

FUSABLE = (torch.float32, *NARROW)
ACTIVATIONS = {None: False, "": False, "silu": True, "swish": True}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

# Elements of a piece of 16 bits: float32 copies stay in the cache. SiLU(norm) of bfloat16,
# 8 x 128 x 64 x 64, forward and backward: 27 ms for pieces of 2**19, 12.4 of 2**18, 12.7 of 2**17
# and 17 of 2**16 (one core of an EPYC).
PIECE = 2**18
# Torch's kernel for channels last is another for fewer pixels, slow for few channels in a group:
# forward and backward of 4 x 64 x 16 x 16 in 32 groups take 492 us in float32, with copies to
# channels first 270; with 4 channels in a group 498 and 448, with 8 193 and 470. In 16 bits it
# takes more time than a copy in float32, and from so many pixels on less.
PIXELS, FEW = 1024, 4

BACKWARD = torch.ops.aten.native_group_norm_backward.default
SILU_BACKWARD = torch.ops.aten.silu_backward.default

Optional = torch.Tensor | None


def reference(
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, silu: bool
) -> torch.Tensor:
    """Compute the definition in the dtype of ``x``, with torch's functions."""
    # What F.group_norm calls: without its question about sizes, which torch.jit.trace warns of.
    y = torch.group_norm(x, groups, weight, bias, eps, torch.backends.cudnn.enabled)
    return _silu(y) if silu else y


def _silu(y: torch.Tensor) -> torch.Tensor:
    return F.silu(y, inplace=not (y.requires_grad or tracing()))


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
    if weight is None and bias is not None:  # torch has no gradient for a bias alone
        weight = torch.ones_like(bias, requires_grad=False)
    y = _at_once(x, groups, weight, bias, eps, silu)
    if y is not None:
        return y
    if tracing():
        return reference(x, groups, weight, bias, eps, silu)
    check(x, groups, weight, bias)
    if not x.numel():
        return _of_nothing(x, weight, bias)
    if _fused(x, weight, bias):
        z: torch.Tensor = FPROP(x, groups, weight, bias, eps, silu)[0]
        return z
    with without_autocast(
        x.device.type
    ):  # which would make torch's output float32, ours with SiLU not
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


def _at_once(
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, silu: bool
) -> Optional:
    """On a CPU without any question that torch answers itself: there every microsecond counts.

    Returns:
        ``None`` if a question is to be asked, or if torch refuses what it is passed.
    """
    if (
        torch.compiler.is_compiling()
        or not x.is_cpu
        or not (weight is None or (weight.is_cpu and weight.dtype == x.dtype))
        or not (bias is None or (bias.is_cpu and bias.dtype == x.dtype))
        or torch.is_autocast_enabled("cpu")
        or _runtime.forced() == "triton"
        or torch._C._get_tracing_state()
        or not x.numel()
    ):
        return None
    try:
        if x.dtype not in NARROW and _first(x):
            return reference(x, groups, weight, bias, eps, silu)
        return _on_cpu(x, groups, weight, bias, eps, silu)
    except (RuntimeError, IndexError):
        return None


def _plain(
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, silu: bool
) -> torch.Tensor:
    way = _on_cpu if x.is_cpu and not torch.compiler.is_compiling() else _composed
    return way(x, groups, weight, bias, eps, silu)


def _on_cpu(
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, silu: bool
) -> torch.Tensor:
    """Outside of the compiler: torch's functions where they are exact and do not crash."""
    arguments = (groups, weight, bias, eps, silu)
    if not ordinary(x, weight, bias):
        return _composed(x, *arguments)
    if not x.is_contiguous():
        # No gaps: torch would copy as well, and then fail as with channels last.
        x = _nhwc(x) if x.stride(1) == 1 else x.contiguous()
    first, recorded = _first(x), wants_gradients(x, weight, bias)
    if _as_it_is(x, weight, bias, silu, first or not recorded, recorded):
        return reference(x, *arguments)
    if first and not silu and wide(x, weight, bias) == torch.float32:
        # Beside float32 weights torch keeps float32 statistics, without a copy of the image. They
        # are off in 16 bits by more than the numbers of a group of a few nearly equal are apart.
        ones = x.new_ones(x.shape[1], dtype=torch.float32) if weight is None else weight.float()
        return reference(x, groups, ones, to_dtype(bias, torch.float32), eps, False)
    if not first and 1 in x.shape[2:]:  # whose strides may be any; torch's kernels mind
        return _of_first(x.contiguous(), *arguments, True)
    if recorded and not _pays(x, groups, first):
        return _of_first(x.contiguous(), *arguments, not first)
    y: torch.Tensor = _on_host(x, *arguments) if recorded else _computed(x, *arguments)[0]
    return y


def _as_it_is(
    x: torch.Tensor, weight: Optional, bias: Optional, silu: bool, safe: bool, recorded: bool
) -> bool:
    """Whether torch's functions take these tensors, and are as exact as ours are to be."""
    if not safe or not _alike(x, weight, bias):
        return False
    return x.dtype not in NARROW or not (silu or recorded)  # forward alone they round once


def _pays(x: torch.Tensor, groups: int, first: bool) -> bool:
    """Whether :class:`_OnHost` is faster than torch's functions with copies."""
    if first:
        # Bfloat16 with SiLU, forward and backward, of torch's time: 1.78 against 1.58 with copies
        # in float32 at 2 x 320 x 32 x 32, 1.94 against 2.88 at 2 x 128 x 64 x 64.
        return x.numel() >= 4 * PIECE
    _, channels, pixels = _sizes(x)
    slow = channels <= FEW * groups and pixels < PIXELS
    return x.numel() >= SMALLEST_ON_CPU["group_norm"] and not slow


def _first(x: torch.Tensor) -> bool:
    """Whether torch takes an image for one with channels first, as it is."""
    return x.dim() not in FORMATS or (x.stride(1) != 1 and x.is_contiguous())


def _alike(x: torch.Tensor, weight: Optional, bias: Optional) -> bool:
    """Whether all is of one dtype."""
    dtype = x.dtype
    return (weight is None or weight.dtype == dtype) and (bias is None or bias.dtype == dtype)


def _composed(
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, silu: bool
) -> torch.Tensor:
    """With torch's differentiable functions, which any transform knows."""
    last = channels_last(x)
    if _fails_with_channels_last(x, weight, bias):
        x = x.contiguous()
    return _of_first(x, groups, weight, bias, eps, silu, last)


def _of_first(
    x: torch.Tensor,
    groups: int,
    weight: Optional,
    bias: Optional,
    eps: float,
    silu: bool,
    last: bool,
) -> torch.Tensor:
    """The result has its channels last if they are to be; ``x`` may have them in either way."""
    dtype = x.dtype
    if _alike(x, weight, bias) and (dtype not in NARROW or not (last or x.is_cpu)):
        y = reference(x, groups, weight, bias, eps, False)
    else:
        # With the original's kernel any pair of dtypes worked, and results were rounded once.
        to = wide(x, weight, bias)
        y = reference(x.to(to), groups, to_dtype(weight, to), to_dtype(bias, to), eps, False)
    if last:
        y = y.contiguous(memory_format=FORMATS[x.dim()])
    y = _silu(y) if silu else y
    return y if y.dtype == dtype else y.to(dtype)


def _fails_with_channels_last(x: torch.Tensor, weight: Optional, bias: Optional) -> bool:
    """Whether torch's functions do: forward-mode derivatives, and what :class:`_OnHost` tells."""
    compiling = torch.compiler.is_compiling()
    if not compiling and not ordinary(x, weight, bias):
        return True
    recorded = x.device.type == "cpu" and wants_gradients(x, weight, bias)
    return recorded and not (compiling and x.requires_grad)  # all gradients are compiled together


def _of_nothing(x: torch.Tensor, *weights: Optional) -> torch.Tensor:
    """No pixel: gradients of weights are 0 where torch's of images without pixels are nan."""
    y = x.clone()
    for tensor in weights:
        if tensor is not None:
            y = y * tensor.to(x.dtype).view(-1, *[1] * (x.dim() - 2))
    return y


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
        x.to(to).contiguous(), to_dtype(weight, to), to_dtype(bias, to), *_sizes(x), groups, eps
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
    if _kernel_runs(x, weight, bias):
        from apex.kernels import group_norm as kernels

        weight, bias = _contiguous(weight), _contiguous(bias)
        dx, sums = kernels.backward(dy, stats.contiguous(), x, groups, weight, bias, silu)
        dbias, dweight = sums
    else:
        to = torch.promote_types(x.dtype, torch.float32)
        gain, shift = to_dtype(weight, to), to_dtype(bias, to)
        image, slope = x.to(to).contiguous(), dy.to(to).contiguous()
        if silu:
            z = torch.native_group_norm(image, gain, shift, *_sizes(x), groups, eps)[0]
            slope = torch.ops.aten.silu_backward(slope, z)
        mean, rstd = (t.contiguous() for t in stats.to(to).unbind(-1))
        mask = [True, weight is not None, weight is not None]
        dx, dweight, dbias = torch.ops.aten.native_group_norm_backward(
            slope, image, mean, rstd, gain, *_sizes(x), groups, mask
        )
        dx = dx.to(x.dtype).contiguous(memory_format=_format(x))
    if weight is None:
        return dx, x.new_empty(0), x.new_empty(0)
    like = weight if bias is None else bias
    return dx, dweight.clone().to(weight.dtype), dbias.clone().to(like.dtype)


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
    images, channels, *pixels = x.shape
    return images, channels, math.prod(pixels)


def _format(x: torch.Tensor) -> torch.memory_format:
    return FORMATS.get(x.dim(), torch.contiguous_format)


def _nhwc(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=_format(x))


def _fprop_fake(x: torch.Tensor, groups: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    to = torch.promote_types(x.dtype, torch.float32)
    y = torch.empty_like(x, memory_format=_format(x))
    return y, x.new_empty(x.shape[0], groups, 2, dtype=to)


def _bprop_fake(
    dy: torch.Tensor,
    stats: torch.Tensor,
    x: torch.Tensor,
    groups: int,
    weight: Optional,
    bias: Optional,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = torch.empty_like(x, memory_format=_format(x))
    if weight is None:
        return dx, x.new_empty(0), x.new_empty(0)
    like = weight if bias is None else bias
    return dx, weight.new_empty(x.shape[1:2]), like.new_empty(x.shape[1:2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, ctx.groups, weight, bias, ctx.eps, ctx.silu = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, output[1])


def _gradients(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, bias, stats = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        options = ctx.groups, ctx.eps, ctx.silu
        return _again(ctx.needs_input_grad, dy, x, weight, bias, *options)
    found = BPROP(dy, stats, x, ctx.groups, weight, bias, ctx.eps, ctx.silu)
    needs = [ctx.needs_input_grad[place] for place in (0, 2, 3)]
    dx, dweight, dbias = (t if need else None for t, need in zip(found, needs, strict=True))
    return dx, None, dweight, dbias, None, None


def _again(
    needed: Sequence[bool],
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    groups: int,
    eps: float,
    silu: bool,
) -> tuple[Any, ...]:
    """Gradients by torch's functions with channels first: under vmap, and differentiable."""
    needs = [needed[place] for place in (0, 2, 3)]
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        y = _composed(x.contiguous(), groups, weight, bias, eps, silu)
        given = zip((x, weight, bias), needs, strict=True)
        wanted = [t for t, need in given if need and t is not None]
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=create))
    dx, dweight, dbias = (next(found) if need else None for need in needs)
    return dx, None, dweight, dbias, None, None


def _on_host(*arguments: Any) -> torch.Tensor:
    # Not `Function.apply`, which takes 2 us to ask about transforms: `ordinary` has answered.
    y: torch.Tensor = super(torch.autograd.Function, _OnHost).apply(*arguments)  # type: ignore[no-untyped-call]
    return y


def _computed(
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, silu: bool
) -> tuple[Any, ...]:
    """``y``, and for its gradients mean, reciprocal deviation and what SiLU is applied to.

    The three are ``None`` if they are to be computed again.
    """
    to = wide(x, weight, bias)
    weight, bias, sizes = to_dtype(weight, to), to_dtype(bias, to), _sizes(x)
    if x.dtype == to:
        z, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, groups, eps)
        return (F.silu(z), mean, rstd, z) if silu else (z, mean, rstd, None)
    if not silu and weight is not None and to == torch.float32 and sizes[2] >= PIXELS:
        return *torch.native_group_norm(x, weight, bias, *sizes, groups, eps), None
    if x.numel() > PIECE:
        return _by_pieces(x, groups, weight, bias, eps, silu), None, None, None
    z, mean, rstd = torch.native_group_norm(x.to(to), weight, bias, *sizes, groups, eps)
    return (F.silu(z) if silu else z).to(x.dtype), mean, rstd, z if silu else None


def _by_pieces(
    x: torch.Tensor, groups: int, weight: Optional, bias: Optional, eps: float, silu: bool
) -> torch.Tensor:
    """``y``: some groups at a time are widened, so that the copies stay in the cache."""
    to = wide(x, weight, bias)
    y = torch.empty_like(x)
    cuts = _cuts(x, groups)
    gains, shifts = _cut(weight, cuts, to), _cut(bias, cuts, to)
    for place, part, out in _pieces(cuts, x, y):
        z = torch.native_group_norm(
            part.to(to), gains[place], shifts[place], *_sizes(part), groups // cuts, eps
        )[0]
        out.copy_(F.silu(z, inplace=True) if silu else z)
    return y


def _back_by_pieces(
    dy: torch.Tensor,
    x: torch.Tensor,
    groups: int,
    weight: Optional,
    bias: Optional,
    eps: float,
    silu: bool,
    mask: list[bool],
) -> tuple[Optional, ...]:
    """Gradients, likewise; norms are computed once more, so that nothing wide is kept."""
    to = wide(x, weight, bias)
    dx = torch.empty_like(x)
    cuts = _cuts(x, groups)
    gains, shifts = _cut(weight, cuts, to), _cut(bias, cuts, to)
    sums: list[tuple[Optional, ...]] = [(None, None)] * cuts
    for place, part, slope, out in _pieces(cuts, x, dy, dx):
        image, slope, gain = part.to(to), slope.to(to), gains[place]
        sizes = (*_sizes(part), groups // cuts)
        z, mean, rstd = torch.native_group_norm(image, gain, shifts[place], *sizes, eps)
        if silu:
            slope = SILU_BACKWARD(slope, z)
        found, *new = BACKWARD(slope, image, mean, rstd, gain, *sizes, mask)
        out.copy_(found)
        sums[place] = tuple(map(_added, sums[place], new))
    dweight, dbias = (
        torch.cat(each) if need else None
        for each, need in zip(zip(*sums, strict=True), mask[1:], strict=True)
    )
    return dx, dweight, dbias


def _added(old: Optional, new: torch.Tensor) -> Optional:
    return new if old is None else old.add_(new)


def _cuts(x: torch.Tensor, groups: int) -> int:
    """In how many pieces an image is computed; in one if their memory would not be in one."""
    needed = x.numel() / x.shape[0] / PIECE
    if channels_last(x) or needed <= 1:
        return 1
    return next((n for n in range(1, groups) if n >= needed and groups % n == 0), groups)


def _cut(tensor: Optional, cuts: int, to: torch.dtype) -> Sequence[Optional]:
    return [None] * cuts if tensor is None else tensor.to(to).view(cuts, -1).unbind()


def _pieces(cuts: int, *tensors: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """A few images of each at a time, or one of the ``cuts`` of an image; and which that is."""
    if cuts == 1:
        step = max(1, PIECE * tensors[0].shape[0] // tensors[0].numel())
        pieces = [torch.split(tensor, step) for tensor in tensors]
    else:
        pieces = [
            t.view(t.shape[0] * cuts, 1, t.shape[1] // cuts, *t.shape[2:]).unbind() for t in tensors
        ]
    return zip(itertools.cycle(range(cuts)), *pieces, strict=False)


class _OnHost(torch.autograd.Function):
    """On a CPU: torch's kernels, in float32 at least, and always the input's gradient.

    Where those of weights are wanted and the input's is not, torch 2.13 writes it through a null
    pointer with channels last; under vmap its own autograd refuses them.
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
        y: torch.Tensor
        y, mean, rstd, z = _computed(x, groups, weight, bias, eps, silu)
        ctx.save_for_backward(x, weight, bias, mean, rstd, z)
        ctx.options = groups, eps, silu
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, rstd, z = ctx.saved_tensors
        groups, eps, silu = ctx.options
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled() or batched(dy):
            return _again(needs, dy, x, weight, bias, *ctx.options)
        mask = [True, needs[2], needs[3]]
        dy = _nhwc(dy) if channels_last(x) else dy.contiguous()
        if mean is None or (x.dtype != mean.dtype and x.numel() > PIECE):
            found = _back_by_pieces(dy, x, groups, weight, bias, eps, silu, mask)
        else:
            to = mean.dtype
            slope = to_dtype(dy, to)
            if silu:
                slope = SILU_BACKWARD(slope, z)
            found = BACKWARD(
                slope, to_dtype(x, to), mean, rstd, to_dtype(weight, to), *_sizes(x), groups, mask
            )
        return found[0], None, *found[1:], None, None  # autograd narrows them


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
