"""Checks of arguments, shared by all operations. Errors say what was passed and what to pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from apex._compat import private

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class ArgumentError(RuntimeError, TypeError, ValueError):
    """An argument that cannot be computed with.

    All three, because torch and NVIDIA's Apex raise ``RuntimeError`` for what Python calls a
    ``TypeError`` or a ``ValueError``, and programs catch either.
    """


def traced() -> bool:
    """Whether ``torch.jit.trace`` records: sizes are tensors then, and torch's functions check."""
    return private.get_tracing_state() is not None  # three frames less than jit.is_tracing


def check_tensors(
    name: str,
    tensors: Mapping[str, Any],
    *,
    floating: Collection[str],
    integers: Collection[str] = (),
    required: Collection[str] = (),
) -> None:
    """Check types, devices and dtypes.

    Args:
        name: Of the operation, for the error.
        tensors: The tensors by name, or None; the first one decides about the device.
        floating: Names of those that have a floating dtype.
        integers: Names of those that have an integer dtype.
        required: Names of those that may not be None, besides the first.

    Raises:
        ArgumentError: One is no tensor, on another device, or of a dtype that is not taken.
    """
    first, device = None, None
    for key, tensor in tensors.items():
        if tensor is None and first is not None and key not in required:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name}: {key} is a {type(tensor).__name__}; pass a tensor.")
        if first is None:
            first, device = key, tensor.device
        elif tensor.device != device:
            raise ArgumentError(
                f"{name}: {key} is on {tensor.device} and {first} on {device}. "
                f"Move one: {key}.to({str(device)!r})."
            )
        if key in floating and tensor.dtype not in FLOATS:
            raise ArgumentError(
                f"{name}: {key} is {tensor.dtype}; allowed are float16, bfloat16, float32 and "
                "float64."
            )
        if key in integers and tensor.dtype not in INTEGERS:
            raise ArgumentError(f"{name}: {key} is {tensor.dtype}; pass an integer dtype.")


def check_shape(
    name: str, key: str, tensor: torch.Tensor | None, shape: tuple[int, ...], reason: str
) -> None:
    """Check the shape of ``tensor``, if there is one.

    Args:
        name: Of the operation, for the error.
        key: Name of the argument.
        tensor: The argument.
        shape: The only allowed shape.
        reason: Where it comes from, such as ``"input has 4 channels"``.

    Raises:
        ArgumentError: The shape is another one.
    """
    if tensor is not None and tensor.shape != shape:
        raise ArgumentError(
            f"{name}: {key} has shape {list(tensor.shape)} and {reason}. Pass {list(shape)}."
        )


def check_unused(name: str, **options: int) -> None:
    """Refuse an option that has no effect, such as a kernel's tile size, if it is no integer."""
    for key, value in options.items():
        if not isinstance(value, int):
            raise ArgumentError(
                f"{name}: {key} is {value!r}; pass an integer or bool. apex ignores its value."
            )
