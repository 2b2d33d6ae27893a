"""What can run here, and why not.

A Triton kernel needs a GPU, the triton package, and a C compiler for the launcher that Triton
builds on first use. Everything has a definition in plain PyTorch that runs wherever torch does, so
the answer decides about speed, never about whether a program works.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])
_path: contextvars.ContextVar[str | None] = contextvars.ContextVar("path", default=None)


@functools.cache
def _missing() -> str | None:
    """What Triton lacks on this machine besides a GPU."""
    if importlib.util.find_spec("triton") is None:
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
        return "no GPU that torch can use"
    return _missing()


def can_fuse(device: torch.device) -> bool:
    """Whether a Triton kernel is to run for tensors on ``device``."""
    wanted = _path.get()
    if wanted is not None:
        return wanted == "triton"
    return device.type == "cuda" and _missing() is None


@contextlib.contextmanager
def use(path: str) -> Iterator[None]:
    """Take one path in this block, whatever the device: for tests and benchmarks.

    Args:
        path: ``"triton"`` (on the CPU in Triton's interpreter) or ``"reference"``.

    Raises:
        ValueError: Another word.
    """
    if path not in ("triton", "reference"):
        raise ValueError(f'path was {path!r}; allowed are "triton" and "reference".')
    token = _path.set(path)
    try:
        yield
    finally:
        _path.reset(token)


def forced() -> str | None:
    """The path that :func:`use` asked for, if any."""
    return _path.get()


def not_compiled(function: _Function) -> _Function:
    """Have ``torch.compile`` call a function as it is, between two graphs.

    Addresses, versions of tensors and launches of kernels are nothing that it could trace. torch's
    optimizers use the same decorator, which imports the compiler at the first call only.
    """
    return cast("_Function", _disable_dynamo(function))


def capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@functools.cache
def has_accelerator() -> bool:
    """Whether there is a device besides the CPU."""
    return torch.accelerator.is_available()


def waits(device: torch.device) -> bool:
    """Whether reading a tensor on ``device`` makes the host wait for it."""
    return device.type != "cpu"
