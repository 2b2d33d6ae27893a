"""Checks of arguments, shared by all operations. Errors say what was passed and what to pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from apex.ops._dtypes import NARROW

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_SCALAR_TYPES = dict(zip(FLOATS, ("Half", "BFloat16", "Float", "Double"), strict=True))


class ArgumentError(RuntimeError, TypeError, ValueError):
    """An argument that cannot be computed with.

    All three, because torch and NVIDIA's Apex raise ``RuntimeError`` for what Python calls a
    ``TypeError`` or a ``ValueError``, and programs catch either.
    """


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
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return  # sizes are tensors then; torch's functions, which are traced, check
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
