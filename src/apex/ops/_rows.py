"""Normalization of rows: what layer norm and RMS norm share, for every way they are called.

An input is a matrix here: its last dimensions, those of ``normalized_shape``, are a row. There are
two implementations of forward and backward, on Triton's kernels and on torch's, and three ways in:

* **eager**: an autograd function, which calls either without the dispatcher in between (an operator
  in Python costs 14 us a call, see :mod:`apex.ops._library`, an autograd function 1 us);
* **while torch.compile traces**, on a GPU or with ``memory_efficient``: a custom operator over the
  same two functions, opaque to the compiler;
* **everything else** (vmap and the other transforms of torch.func, forward-mode derivatives,
  jit.trace, tensor subclasses, dispatch modes, compilation for a CPU, float64): a composition of
  torch's differentiable functions.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from apex.ops import _memory, _rows_torch, _runtime
from apex.ops._dtypes import NARROW, Optional, to_dtype, wide
from apex.ops._library import batched, define, wants_gradients
from apex.ops._rows_torch import ROWS_ADDED
from apex.ops._thresholds import SMALLEST, SMALLEST_ON_CPU

Shape = Sequence[int]

NAMES = {
    torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float",
    torch.float64: "Double",
}  # fmt: skip
FLOATS = frozenset(NAMES)
IN_KERNELS = (torch.float32, torch.float16, torch.bfloat16)
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


# -- checks --------------------------------------------------------------------------------------


def check(name: str, x: torch.Tensor, weight: Optional, bias: Optional, shape: Shape) -> None:
    """Refuse what cannot be computed.

    Raises:
        RuntimeError: Shapes that do not fit, tensors on several devices, or no floating dtype;
            with the words of torch and of Apex, which programs look for.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return  # sizes are tensors then; torch's functions, which are traced, check
    if x.dtype in FLOATS and _fits(x, weight, bias, tuple(shape)):
        return
    if not shape:
        raise RuntimeError(
            f"{name}: Expected normalized_shape to be at least 1-dimensional, i.e., containing at "
            f"least one element, but got normalized_shape = {tuple(shape)}"
        )
    if x.shape[-len(shape) :] != tuple(shape):
        wanted = ", ".join(["*", *map(str, shape)])
        raise RuntimeError(
            f"{name}: Given normalized_shape={list(shape)}, expected input with shape [{wanted}], "
            f"but got input of size{list(x.shape)}"
        )
    if x.dtype not in FLOATS:
        raise RuntimeError(
            f"{name}: input is {x.dtype}; allowed are float16, bfloat16, float32 and float64"
        )
    for word, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            _check_parameter(name, x, word, tensor, shape)
    if bias is not None and (weight is None or weight.dtype != bias.dtype):
        dtype = None if weight is None else weight.dtype
        raise RuntimeError(
            f"{name}: weight is {dtype} and bias {bias.dtype}; pass both in one dtype, or no bias"
        )


def _fits(x: torch.Tensor, weight: Optional, bias: Optional, shape: tuple[int, ...]) -> bool:
    """Whether everything is as it has to be, as fast as that can be told."""
    if not shape or x.shape[-len(shape) :] != shape:
        return False
    if weight is None:
        return bias is None
    if weight.shape != shape or weight.dtype not in FLOATS or weight.device != x.device:
        return False
    return bias is None or (
        bias.shape == shape and bias.dtype == weight.dtype and bias.device == x.device
    )


def _check_parameter(
    name: str, x: torch.Tensor, word: str, parameter: torch.Tensor, shape: Shape
) -> None:
    if parameter.shape != tuple(shape):
        raise RuntimeError(
            f"{name}: Expected {word} to be of same shape as normalized_shape, but got {word} "
            f"of shape {list(parameter.shape)} and normalized_shape = {list(shape)}"
        )
    if parameter.device != x.device:
        raise RuntimeError(
            f"{name}: Expected all tensors to be on the same device, but input is on "
            f"{x.device} and {word} on {parameter.device}"
        )
    if not parameter.is_floating_point():
        raise RuntimeError(
            f"{name}: {word} is {parameter.dtype}; allowed are float16, bfloat16, float32, float64"
        )


def refuse_other_dtype(x: torch.Tensor, weight: Optional, mixed: str) -> None:
    """Refuse a weight of another dtype than the input's, in torch's words; ``mixed`` takes it.

    What is no floating dtype at all is left to :func:`check`.
    """
    if weight is not None and weight.dtype != x.dtype and {x.dtype, weight.dtype} <= FLOATS:
        raise RuntimeError(
            f"expected scalar type {NAMES.get(x.dtype, x.dtype)} but found "
            f"{NAMES.get(weight.dtype, weight.dtype)}: the input is {x.dtype} and the weight "
            f"{weight.dtype}. Use {mixed}, whose output has the weight's dtype, or torch.autocast, "
            "or cast one of them."
        )


def refuse_wider_weight(x: torch.Tensor, weight: Optional, mixed: str) -> None:
    """As above, but for 16-bit weights beside a wider input."""
    if weight is None or weight.dtype not in NARROW or x.dtype in NARROW:
        refuse_other_dtype(x, weight, mixed)


# -- autocast ------------------------------------------------------------------------------------


def narrowed(*tensors: Any) -> tuple[Any, ...]:
    """Cast floating tensors to autocast's dtype if it is on for the first one's device.

    float64 is left alone.
    """
    kind = "cpu" if tensors[0].is_cpu else tensors[0].device.type
    if not _autocasts(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        tensor
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64
        else tensor.to(dtype)
        for tensor in tensors
    )


def _autocasts(kind: str) -> bool:
    known = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return known and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Turn autocast off, if it is on."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if _autocasts(kind) else nullcontext()


# -- torch's differentiable functions ------------------------------------------------------------


def composed(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Shape,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
) -> torch.Tensor:
    """Normalize with torch's differentiable functions: any derivative, any transform.

    The gradients of torch's 16-bit layer norm on a CPU are more than a rounding off.
    """
    same = x.dtype == dtype and (weight is None or weight.dtype == dtype)
    if not same or (centered and x.is_cpu and dtype in NARROW):
        to = wide(x, weight)
        x, weight, bias = x.to(to), to_dtype(weight, to), to_dtype(bias, to)
    y = _torch_norm(x, weight, bias, shape, eps, centered)
    return y if y.dtype == dtype else y.to(dtype)


def _torch_norm(
    x: torch.Tensor, weight: Optional, bias: Optional, shape: Shape, eps: float, centered: bool
) -> torch.Tensor:
    if centered:
        return F.layer_norm(x, list(shape), weight, bias, eps)
    return F.rms_norm(x, list(shape), weight, eps)


# -- forward and backward on matrices ------------------------------------------------------------


def _kernel_runs(x: torch.Tensor, name: str, memory_efficient: bool) -> bool:
    if x.dtype not in IN_KERNELS or x.numel() == 0:
        return False
    forced = _runtime.forced()
    if forced is not None or not x.is_cuda:
        return forced == "triton"
    return (memory_efficient or x.numel() >= SMALLEST[name]) and _runtime.can_fuse(x.device)


def _name(centered: bool) -> str:
    return "layer_norm" if centered else "rms_norm"


def _kernels(centered: bool) -> Any:
    # late: importing an operation must not import triton
    return importlib.import_module(f"apex.kernels.{_name(centered)}")


def _row(parameter: Optional) -> Optional:
    return None if parameter is None else parameter.reshape(-1).contiguous()


def forward(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Shape,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
    memory_efficient: bool = False,
) -> tuple[torch.Tensor, Optional, torch.Tensor]:
    """Normalize, outside of autograd.

    Returns:
        ``y`` of ``dtype``; the mean of each row if ``centered``; ``1 / sigma`` of each row. These
        two are ``(rows,)`` in float32, in float64 for a float64 input.
    """
    n_cols = math.prod(shape)
    rows = x.reshape(math.prod(x.shape[: -len(shape)]), n_cols)
    weight_row, bias_row = _row(weight), _row(bias)
    if _kernel_runs(x, _name(centered), memory_efficient):
        y, mean, rstd = _kernels(centered).forward(
            rows.contiguous(), weight_row, bias_row, eps, dtype
        )
    else:
        y, mean, rstd = _rows_torch.forward(rows, weight_row, bias_row, eps, dtype, centered)
    return y.resize_(x.shape), mean, rstd  # autograd lets nobody change a view in place


def backward(
    dy: torch.Tensor,
    saved: torch.Tensor,
    mean: Optional,
    rstd: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Shape,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
    memory_efficient: bool,
    weight_gradients: bool = True,
) -> tuple[torch.Tensor, Optional, Optional]:
    """Gradients of :func:`forward`, outside of autograd.

    Args:
        dy: Gradient of the output.
        saved: The input; with ``memory_efficient`` the output.
        mean: From the forward; not needed with ``memory_efficient``, or for RMS norm.
        rstd: From the forward.
        weight: As in the forward.
        bias: As in the forward.
        shape: As in the forward.
        eps: As in the forward.
        dtype: Of the input, and of its gradient.
        centered: Layer norm rather than RMS norm.
        memory_efficient: Whether ``saved`` is the output, from which the normalized input is made
            again: ``(y - bias) / weight``, where a weight smaller than ``eps`` counts as ``eps``.
        weight_gradients: Whether those of weight and bias are wanted.

    Returns:
        Gradients of input, weight and bias.
    """
    n_cols = math.prod(shape)
    size = (math.prod(saved.shape[: saved.dim() - len(shape)]), n_cols)
    weight_row, bias_row = _row(weight), _row(bias)
    mean = None if memory_efficient or not centered else mean
    _check_saved(size, dy, saved, mean, rstd, needs_mean=centered and not memory_efficient)
    if _kernel_runs(saved, _name(centered), memory_efficient) and dtype in IN_KERNELS:
        dx, dweight, dbias = _kernels(centered).backward(
            dy.reshape(size).contiguous(), saved.reshape(size).contiguous(), mean, rstd,
            weight_row, bias_row, eps, dtype, from_output=memory_efficient,
            weight_gradients=weight_gradients,
        )  # fmt: skip
    else:
        dx, dweight, dbias = _rows_torch.backward(
            dy.reshape(size), saved.reshape(size), mean, rstd, weight_row, bias_row, eps, dtype,
            centered, memory_efficient, weight_gradients,
        )  # fmt: skip
    dweight = dweight if dweight is None or weight is None else dweight.resize_(weight.shape)
    dbias = dbias if dbias is None or bias is None else dbias.resize_(bias.shape)
    return dx.resize_(dy.shape), dweight, dbias


def _check_saved(
    size: tuple[int, int],
    dy: torch.Tensor,
    saved: torch.Tensor,
    mean: Optional,
    rstd: torch.Tensor,
    *,
    needs_mean: bool,
) -> None:
    """Refuse what kernels would read beyond its end."""
    if saved.shape != dy.shape:
        raise RuntimeError(
            f"the gradient has shape {list(dy.shape)} and the saved tensor {list(saved.shape)}; "
            "pass two of one shape"
        )
    for word, tensor in (("1 / sigma", rstd), ("mean", mean)):
        if tensor is None and not (word == "mean" and needs_mean):
            continue
        found = None if tensor is None else tensor.numel()
        if found != size[0]:
            raise RuntimeError(f"{word} has {found} elements; pass one for each of {size[0]} rows")


# -- autograd, eager -----------------------------------------------------------------------------


def save_and_run(
    ctx: Any,
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Shape,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
    memory_efficient: bool,
) -> torch.Tensor:
    """Forward of an autograd function."""
    run = _OP if torch.compiler.is_compiling() else forward
    y, mean, rstd = run(x, weight, bias, shape, eps, dtype, centered, memory_efficient)
    if memory_efficient:
        ctx.save_for_backward(y, weight, bias, None, rstd)
    else:
        ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.shape, ctx.eps, ctx.centered = tuple(shape), eps, centered
    ctx.memory_efficient, ctx.dtype, ctx.out_dtype = memory_efficient, x.dtype, dtype
    return y


def run_saved(
    ctx: Any, dy: torch.Tensor, weight_gradients: bool = True
) -> tuple[Optional, Optional, Optional]:
    """Backward of an autograd function: gradients of input, weight and bias."""
    saved, weight, bias, mean, rstd = ctx.saved_tensors
    with without_autocast(dy.device):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _differentiable(ctx, dy, saved, weight, bias)
        arguments = (
            dy, saved, mean, rstd, weight, bias, ctx.shape, ctx.eps, ctx.dtype, ctx.centered,
            ctx.memory_efficient, weight_gradients,
        )  # fmt: skip
        if _is_plain(dy, saved) and not batched(dy):
            return backward(*arguments)
        dx, dweight, dbias = _BACKWARD_OP(*arguments)
    given = [tensor is not None and weight_gradients for tensor in (weight, bias)]
    return dx, dweight if given[0] else None, dbias if given[1] else None


def _differentiable(
    ctx: Any, dy: torch.Tensor, x: torch.Tensor, weight: Optional, bias: Optional
) -> tuple[Optional, Optional, Optional]:
    """Gradients that can be differentiated again, for ``create_graph=True``."""
    if ctx.memory_efficient:
        raise RuntimeError(
            f"{_name(ctx.centered)}: memory_efficient=True keeps no input, so that gradients of "
            "gradients (create_graph=True) cannot be computed; pass memory_efficient=False"
        )
    wanted = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    y = composed(x, weight, bias, ctx.shape, ctx.eps, ctx.out_dtype, ctx.centered)
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    dx, dweight, dbias = [
        next(found) if tensor is not None and tensor.requires_grad else None
        for tensor in (x, weight, bias)
    ]
    return dx, dweight, dbias


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Optional, bias: Optional, *rest: Any) -> Any:
        return save_and_run(ctx, x, weight, bias, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wanted = any(ctx.needs_input_grad[1:3])
        return (*run_saved(ctx, grads[0], wanted), None, None, None, None, None)


# -- autograd, while compiling -------------------------------------------------------------------


def _run_op(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Shape,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
    memory_efficient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, mean, rstd = forward(x, weight, bias, shape, eps, dtype, centered, memory_efficient)
    return y, rstd.new_empty(0) if mean is None else mean, rstd


def _fake_op(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Shape,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
    memory_efficient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n_rows = math.prod(x.shape[: -len(shape)])
    rstd = x.new_empty(n_rows, dtype=wide(x))
    return x.new_empty(x.shape, dtype=dtype), rstd.new_empty(n_rows if centered else 0), rstd


def _run_backward_op(
    dy: torch.Tensor,
    saved: torch.Tensor,
    mean: Optional,
    rstd: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Shape,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
    memory_efficient: bool,
    weight_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dweight, dbias = backward(
        dy, saved, mean if centered else None, rstd, weight, bias, shape, eps, dtype, centered,
        memory_efficient, weight_gradients,
    )  # fmt: skip
    return (
        dx,
        dx.new_empty(0) if dweight is None else dweight,
        dx.new_empty(0) if dbias is None else dbias,
    )


def _fake_backward_op(
    dy: torch.Tensor,
    saved: torch.Tensor,
    mean: Optional,
    rstd: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Shape,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
    memory_efficient: bool,
    weight_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = dy.new_empty(dy.shape, dtype=dtype)
    wanted = [tensor if weight_gradients else None for tensor in (weight, bias)]
    dweight, dbias = [
        dx.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in wanted
    ]
    return dx, dweight, dbias


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, ctx.shape, ctx.eps, ctx.out_dtype, ctx.centered, ctx.memory_efficient = inputs
    y, mean, rstd = output
    ctx.dtype = x.dtype
    ctx.mark_non_differentiable(mean, rstd)
    if ctx.memory_efficient:
        ctx.save_for_backward(y, weight, bias, None, rstd)
    else:
        ctx.save_for_backward(x, weight, bias, mean if ctx.centered else None, rstd)


def _op_gradient(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    return (*run_saved(ctx, dy, any(ctx.needs_input_grad[1:3])), None, None, None, None, None)


_OP = define(
    "normalize_rows(Tensor x, Tensor? weight, Tensor? bias, SymInt[] shape, float eps, "
    "ScalarType dtype, bool centered, bool memory_efficient) -> (Tensor, Tensor, Tensor)",
    _run_op,
    _fake_op,
    keep=_set_up,
    backward=_op_gradient,
)
_BACKWARD_OP = define(
    "normalize_rows_backward(Tensor dy, Tensor saved, Tensor? mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, SymInt[] shape, float eps, ScalarType dtype, bool centered, "
    "bool memory_efficient, bool weight_gradients) -> (Tensor, Tensor, Tensor)",
    _run_backward_op,
    _fake_backward_op,
)


# -- the choice ----------------------------------------------------------------------------------


def _is_plain(x: torch.Tensor, weight: Optional) -> bool:
    """Whether this is an eager call on ordinary tensors."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in PLAIN
        and (weight is None or type(weight) in PLAIN)
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def at_once(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Shape,
    eps: float,
    memory_efficient: bool,
    centered: bool,
) -> Optional:
    """Torch's own function where nothing else matters than that every microsecond counts.

    Returns:
        ``None`` if that is not so. Torch checks what it is passed, so that nothing else has to.
    """
    if memory_efficient or not (_small(x, shape, centered) and _alike(x, weight, bias)):
        return None
    try:
        if centered:
            return torch.layer_norm(x, shape, weight, bias, eps)
        return torch.rms_norm(x, shape, weight, eps)
    except (RuntimeError, ValueError):
        check(_name(centered), x, weight, bias, shape)
        raise


def _small(x: torch.Tensor, shape: Shape, centered: bool) -> bool:
    """Whether torch's function is as exact for this input and as fast, in what it is called in."""
    return (
        not torch.compiler.is_compiling()
        and x.is_cpu
        and not torch._C._get_tracing_state()
        and (
            bool(shape) and x.numel() <= ROWS_ADDED * shape[-1] and x.dtype == torch.float32
            if centered
            else x.numel() < SMALLEST_ON_CPU["rms_norm"] and x.dtype in FLOATS
        )
        and not torch.is_autocast_enabled("cpu")
        and _runtime.forced() is None
    )


def _alike(x: torch.Tensor, weight: Optional, bias: Optional) -> bool:
    """Whether parameters are on the CPU and of the input's dtype."""
    if weight is None:
        return bias is None
    if not weight.is_cpu or weight.dtype != x.dtype:
        return False
    return bias is None or (bias.is_cpu and bias.dtype == x.dtype)


def normalize(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Shape,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
    memory_efficient: bool,
) -> torch.Tensor:
    """Check, and normalize by the way that fits the call."""
    check(_name(centered), x, weight, bias, shape)
    arguments = (x, weight, bias, shape, eps, dtype, centered, memory_efficient)
    if _autocasts(x.device.type):
        with without_autocast(x.device):
            return _normalized(*arguments)
    return _normalized(*arguments)


def _normalized(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    shape: Shape,
    eps: float,
    dtype: torch.dtype,
    centered: bool,
    memory_efficient: bool,
) -> torch.Tensor:
    arguments = (x, weight, bias, shape, eps, dtype, centered)
    if torch.compiler.is_compiling():
        if memory_efficient or x.is_cuda:
            y: torch.Tensor = _OP(*arguments, memory_efficient)[0]
            return y
        return composed(*arguments)
    if not _is_plain(x, weight) or wide(x, weight) == torch.float64:
        return composed(*arguments)
    if memory_efficient or _has_own_path(x, weight, bias, centered):
        z: torch.Tensor = _Rows.apply(*arguments, memory_efficient)  # type: ignore[no-untyped-call]
        return z
    same = x.dtype == dtype and (weight is None or weight.dtype == dtype)
    if same and x.numel() >= SMALLEST_ON_CPU["layer_norm"] and not wants_gradients(x, weight, bias):
        return _torch_norm(x, weight, bias, shape, eps, centered)  # forward it is as good
    return composed(*arguments)


def _has_own_path(x: torch.Tensor, weight: Optional, bias: Optional, centered: bool) -> bool:
    """Whether torch's function is not as good here."""
    forced = _runtime.forced()
    if x.numel() == 0:
        return False
    if forced is not None or not x.is_cpu:
        return forced == "reference" or _kernel_runs(x, _name(centered), memory_efficient=False)
    if not centered:
        return x.numel() >= SMALLEST_ON_CPU["rms_norm"]
    if _memory.pays(x.numel(), x.dtype, x.device):
        return True
    if not wants_gradients(x, weight, bias):
        return False
    if x.dtype == torch.float32:
        return x.shape[-1] * ROWS_ADDED * torch.get_num_threads() < x.numel()
    return x.numel() >= SMALLEST_ON_CPU["layer_norm"]
