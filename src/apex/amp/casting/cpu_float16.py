"""float16 on a CPU: operands in float16, products and sums in float32, results rounded once.

This is what a tensor core with float32 accumulation computes. torch's own float16 kernels for a CPU
are slow: with float16 instructions the gradient of a convolution takes oneDNN's reference code (16
to 32 channels, 16x16, batch 128: 856 ms for the weight, float32 takes 3.1 ms), without them matrix
products and convolutions take 40 to 60 times float32's time.

The kernels here stand under dispatch key ``CPU``, below autograd, so they serve both passes, and
what autograd saves stays float16. They widen the operands, call torch's own kernel, and round its
result; other dtypes are passed on. Recurrent layers are taken whole, above autograd: float32
between time steps, and saved for the backward pass. In ``inference_mode`` and in forward-mode
derivatives torch decomposes them, and each product rounds. Not covered are in-place and ``out=``
variants, which ``torch.compile`` calls for matrix products.

Registered once in a process and, by amp, never taken off: torch frees a kernel that is taken off,
even while another thread runs it. :func:`switch` has all of them pass their calls on.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from apex._compat import private
from apex.amp.casting.dispatcher import caster, operator, skip_frames, tensors_in

_Kernel = Callable[..., Any]

_GRADIENT = "convolution_backward"
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_ATTENTION_GRADIENT = "_scaled_dot_product_flash_attention_for_cpu_backward"
# Where the CPU has no float16 instructions.
_PRODUCTS = "convolution mm addmm _addmm_activation bmm baddbmm mv addmv dot vdot"
_RECURRENT = tuple(
    f"{layer}.{overload}"
    for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload in ("input", "data")
)

_OTHERS = (torch.bfloat16, torch.float32, torch.float64)
_wide = caster(torch.float32, (torch.float16,))
_lock = threading.Lock()
_thread = threading.local()
_library: Any = None
_is_on = False


@contextmanager
def left_out() -> Iterator[None]:
    """In this context :func:`begin` does nothing in this thread."""
    _thread.is_left_out = True
    try:
        yield
    finally:
        _thread.is_left_out = False


def begin(dtype: torch.dtype | None, devices: Collection[str]) -> None:
    """Have float16 on the CPU compute in float32 from now on, if a training uses them."""
    if dtype == torch.float16 and "cpu" in devices and not getattr(_thread, "is_left_out", False):
        _install()
        switch(on=True)


def switch(*, on: bool) -> None:
    """Have the kernels widen, or pass all calls on to torch's; in all threads."""
    global _is_on  # noqa: PLW0603  # kernels are the process's
    _is_on = on


def is_on() -> bool:
    """Whether float16 on a CPU computes in float32 now, as :func:`widened` says."""
    return _is_on


def widened() -> tuple[str, ...]:
    """The operators of ``aten`` that are computed in float32 on this CPU."""
    always = (_GRADIENT, _ATTENTION, _ATTENTION_GRADIENT, "addbmm")
    if has_float16_instructions():
        return always
    return (*always, *_PRODUCTS.split(), *_RECURRENT)


def has_float16_instructions() -> bool:
    """Whether oneDNN multiplies float16 on this CPU (``ONEDNN_MAX_CPU_ISA`` is heeded)."""
    try:
        return bool(private.is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


def _install() -> None:
    global _library  # noqa: PLW0603
    with _lock:
        if _library is not None:
            return
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():  # torch warns that its kernel is replaced
            warnings.simplefilter("ignore", UserWarning)
            for name in widened():
                _register(library, name)
        _library = library


def remove() -> None:
    """Take the kernels off; only where no other thread runs torch's operations."""
    global _library  # noqa: PLW0603
    switch(on=False)
    with _lock:
        if _library is not None:
            _library._destroy()
            _library = None


def _register(library: Any, name: str) -> None:
    op = operator(name)
    if op is None:
        return
    call = torch.library.get_kernel(op, "CPU").call_boxed
    is_recurrent, is_attention = name in _RECURRENT, name in (_ATTENTION, _ATTENTION_GRADIENT)
    make = _attention_kernel if is_attention else _product_kernel
    kernel = _recurrent_kernel(call) if is_recurrent else make(call)
    skip_frames(kernel)  # met by Dynamo where a graph breaks, as at nn.LSTM
    # Under CPU torch.export would take a recurrent layer for an operator without decomposition.
    library.impl(name, kernel, "AutogradCPU" if is_recurrent else "CPU", with_keyset=True)


def _product_kernel(call: _Kernel) -> _Kernel:
    half, is_tensor = torch.float16, torch.Tensor

    def kernel(keys: Any, first: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if first.dtype is not half or not _is_on:
            return call(keys, first, *rest, **options)
        wide = []
        for value in rest:
            if isinstance(value, is_tensor):
                if value.dtype is not half:
                    return call(keys, first, *rest, **options)  # torch's own error
                wide.append(value.float())
            else:
                wide.append(value)
        result = call(keys, first.float(), *wide, **options)
        return result.to(half) if isinstance(result, is_tensor) else _rounded(result)

    return kernel


def _attention_kernel(call: _Kernel) -> _Kernel:
    half = torch.float16

    def kernel(keys: Any, first: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if first.dtype is not half or not _is_on:
            return call(keys, first, *rest, **options)
        options = {name: _wide(value) for name, value in options.items()}  # attn_mask
        result = call(keys, first.float(), *map(_wide, rest), **options)
        if len(result) == 2:  # the forward's second result, logsumexp, is float32 in torch too
            return _rounded(result[0]), result[1]
        return _rounded(result)

    return kernel


def _recurrent_kernel(call: _Kernel) -> _Kernel:
    half = torch.float16

    def kernel(keys: Any, first: torch.Tensor, *rest: Any) -> Any:
        if first.dtype is not half or not _is_on or private.forward_ad._current_level >= 0:
            return call(keys, first, *rest)
        if [*tensors_in(rest, _OTHERS)]:
            return call(keys, first, *rest)  # torch's own error
        return _rounded(call(keys, first.float(), *map(_wide, rest)))

    return kernel


def _rounded(result: Any) -> Any:
    """``result`` in float16; ``None`` stands for a gradient that was not asked for."""
    if isinstance(result, torch.Tensor):
        return result.to(torch.float16)
    return None if result is None else tuple([_rounded(item) for item in result])
