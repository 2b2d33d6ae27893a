"""What can run here, and why not.

A Triton kernel needs a GPU, the triton package, and a C compiler for the launcher that Triton
builds on first use. Everything has a definition in plain PyTorch that runs wherever torch does, so
the answer decides about speed, never about whether a program works.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from apex._compat import private

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of the kernels
HAS_TRITON = importlib.util.find_spec("triton") is not None  # without importing it

_Function = TypeVar("_Function", bound=Callable[..., Any])
TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)  # no subclass
# What compiles the frames of this thread, if anything does.
_frames_are_compiled: Callable[[], Any] = private.get_eval_frame_callback
_forced: list[str] = []  # a list and no context variable, which torch.compile cannot trace


@functools.cache
def _missing() -> str | None:
    """What Triton lacks on this machine besides a GPU."""
    if not HAS_TRITON:
        return "the triton package is not installed: pip install triton"
    names = [os.environ.get("CC"), "gcc", "clang", "cc"]
    if not any(name and shutil.which(name) for name in names):
        return "no C compiler for Triton's launcher: install gcc or clang, or set CC"
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        return "no Python.h for Triton's launcher: install Python's development headers"
    return None


def why_not_triton(device_type: str = "cuda") -> str | None:
    """Why no Triton kernel can run on ``device_type``; ``None`` if one can."""
    if device_type != "cuda":
        return f"Triton has no kernels for {device_type}"
    if not torch.cuda.is_available():
        return "torch finds no GPU that it can use"
    return _missing()


def can_fuse(device: torch.device) -> bool:
    """Whether a Triton kernel is to run for tensors on ``device``."""
    if _forced:
        return _forced[-1] == "triton"
    return device.type == "cuda" and _missing() is None


def compiles(x: torch.Tensor) -> bool:
    """Whether a compiled graph may get an operator: on a CPU it always gets the definition."""
    return _forced[-1] == "triton" if _forced else x.is_cuda and HAS_TRITON


@contextlib.contextmanager
def use(path: str) -> Iterator[None]:
    """Take one path in this block, in all threads, whatever the device: for tests and benchmarks.

    Args:
        path: ``"triton"`` (on the CPU in Triton's interpreter) or ``"reference"``.

    Raises:
        ValueError: Another word.
    """
    if path not in ("triton", "reference"):
        raise ValueError(f'path was {path!r}; allowed are "triton" and "reference".')
    _forced.append(path)
    try:
        yield
    finally:
        _forced.pop()


def forced() -> str | None:
    """The path that :func:`use` asked for, if any."""
    return _forced[-1] if _forced else None


def recorded() -> bool:
    """Whether torch.compile or a dispatch mode records operators, so that ours has to be one."""
    return torch.compiler.is_compiling() or private.len_torch_dispatch_stack() > 0


def transformed() -> bool:
    """Whether vmap, another transform, forward-mode derivatives or jit.trace are at work."""
    return (
        private.are_functorch_transforms_active()
        or private.forward_ad._current_level >= 0
        or (not torch.compiler.is_compiling() and private.get_tracing_state() is not None)
    )


def batched(gradient: torch.Tensor) -> bool:
    """Whether a backward runs under vmap, for instance with ``is_grads_batched``."""
    return bool(private.is_legacy_batchedtensor(gradient) or private.is_batchedtensor(gradient))


def autocasts(device_type: str) -> bool:
    """Whether ``torch.autocast`` is on; not every type of device has it: meta does not."""
    known = device_type in ("cpu", "cuda") or torch.amp.is_autocast_available(device_type)
    return known and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Turn autocast off in a ``with`` block."""
    if autocasts(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def not_compiled(function: _Function) -> _Function:
    """Have ``torch.compile`` call a function as it is, between two graphs.

    Addresses, versions of tensors and launches of kernels are nothing that it could trace. torch's
    optimizers use the same decorator, which imports the compiler at the first call only.
    """
    disabled = private.disable_dynamo(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        # What torch returns takes 3 us a call. Where the compiler is at work neither for this frame
        # nor for those that it opens, the function needs no protection.
        if torch.compiler.is_compiling() or _frames_are_compiled() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return cast("_Function", called)


def capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph: not before torch has initialized CUDA.

    ``torch.cuda.is_available`` would count devices each time: 7 Python calls with torch for CUDA.
    """
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return has_cuda and torch.cuda.is_current_stream_capturing()


@functools.cache
def has_accelerator() -> bool:
    """Whether there is a device besides the CPU."""
    return torch.accelerator.is_available()


def waits(device: torch.device) -> bool:
    """Whether reading a tensor on ``device`` makes the host wait for it."""
    return device.type != "cpu"
