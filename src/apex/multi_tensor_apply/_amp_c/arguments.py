"""What the functions of ``amp_C`` take, checked before anything runs: lists, numbers, flags.

The original walks raw memory, so it compares numbers of elements only. Lists are taken here as it
takes them, and messages hold its words, which callers match.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch

from apex.ops import _runtime
from apex.ops.lists.columns import Scalar, flag_on, local, scalar_on, set_flag

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

Lists = Sequence[Sequence[torch.Tensor]]
Number = float | torch.Tensor

_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_DIMS = {torch.channels_last: 4, torch.channels_last_3d: 5}
_NAMES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def entry(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a function of ``amp_C``: no gradients, and called as it is by what is compiled."""
    eager = torch.no_grad()(function)
    uncompiled = _runtime.not_compiled(eager)  # imports the compiler when it is called: 1.5 s

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        chosen = uncompiled if torch.compiler.is_compiling() else eager
        return chosen(*arguments, **keywords)

    return call


def checked(name: str, lists: Lists, depths: Sequence[int]) -> list[list[torch.Tensor]]:
    """Check lists of tensors and make those at one position equal in shape.

    Args:
        name: Of the function, for messages.
        lists: Equally long lists; the tensors at one position have one number of elements.
        depths: How many lists there may be.

    Returns:
        The lists; where the shapes at a position differ, views of the memory in its order.

    Raises:
        RuntimeError: The lists do not fit; the messages are those of the original.
    """
    if len(lists) not in depths:
        wanted = " or ".join(map(str, depths))
        raise RuntimeError(
            f"tensor_lists.size() != depth: {name} takes {wanted} lists of tensors and got "
            f"{len(lists)}."
        )
    columns = [[local(tensor) for tensor in tensors] for tensors in lists]
    first = columns[0]
    if not first:
        raise RuntimeError(f"tensor_lists[0].size() is not > 0: {name} got no tensors.")
    for number, column in enumerate(columns):
        if len(column) != len(first):
            raise RuntimeError(
                f"Size mismatch among tensor lists: {name} got {len(first)} tensors in list 0 and "
                f"{len(column)} in list {number}."
            )
    for number, column in enumerate(columns):
        for index, tensor in enumerate(column):
            _check_tensor(name, f"list {number}, tensor {index}", tensor, first[0], first[index])
    positions = [_alike(position) for position in zip(*columns, strict=True)]
    return [list(column) for column in zip(*positions, strict=True)]


def _check_tensor(
    name: str, where: str, tensor: torch.Tensor, first: torch.Tensor, beside: torch.Tensor
) -> None:
    if tensor.layout != torch.strided or _memory_format(tensor) is None:
        raise RuntimeError(
            f"A tensor was not contiguous. {name}, {where}: layout {tensor.layout}, shape "
            f"{tuple(tensor.shape)}. Contiguous, channels_last and channels_last_3d are taken."
        )
    if tensor.device != first.device:
        raise RuntimeError(
            "A tensor was not on the same device as the first tensor. "
            f"{name}, {where}: {tensor.device}; the first tensor is on {first.device}."
        )
    if tensor.numel() != beside.numel():
        raise RuntimeError(
            f"Size mismatch: {name}, {where} has {tensor.numel()} elements; the tensor of list 0 "
            f"has {beside.numel()}."
        )
    if not tensor.is_floating_point():
        kind = _NAMES.get(tensor.dtype, str(tensor.dtype))
        raise RuntimeError(
            f"\"{name}\" not implemented for '{kind}' ({where}). Floating types are taken."
        )


def _memory_format(tensor: torch.Tensor) -> torch.memory_format | None:
    for layout in _FORMATS:
        if _DIMS.get(layout, tensor.dim()) != tensor.dim():
            continue
        if tensor.is_contiguous(memory_format=layout):
            return layout
    return None


def _alike(position: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    shape = position[0].shape
    if all(tensor.shape == shape for tensor in position):
        return position
    return [_linear(tensor) for tensor in position]


def _linear(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.movedim(1, -1).view(-1)


def number(value: object, device: torch.device) -> Scalar:
    """Take what converts to a float: numbers, NumPy's scalars, one-element tensors.

    A tensor elsewhere than on the CPU is not read here but handed over to be read on ``device``.

    Raises:
        TypeError: Anything else.
    """
    if isinstance(value, torch.Tensor):
        return scalar_on(value, device)
    return float(value)  # type: ignore[arg-type]  # it says itself what it cannot take


def step_number(step: int | torch.Tensor, device: torch.device) -> int | torch.Tensor:
    """Take the number of the step: one on the CPU as an int, another one on ``device``."""
    if not isinstance(step, torch.Tensor) or step.is_cpu:
        return int(step)
    return step.detach().to(device, non_blocking=device.type != "cpu")


def one_each(name: str, numbers: torch.Tensor, column: Sequence[torch.Tensor]) -> torch.Tensor:
    """Take a number for each tensor of ``column``: float32 ``(tensors,)`` on its device.

    Raises:
        RuntimeError: Another number of them.
    """
    if numbers.numel() != len(column):
        raise RuntimeError(f"{name} has {numbers.numel()} elements for {len(column)} tensors.")
    numbers, device = numbers.detach().reshape(-1), column[0].device
    if numbers.is_cpu and device.type == "cuda":  # from pageable memory the host would wait
        numbers = numbers.float().pin_memory()
    return numbers.to(device, torch.float32, non_blocking=device.type != "cpu")


def is_decoupled(name: str, mode: int) -> bool:
    """Take ``mode``, the kind of weight decay: whether it is decoupled.

    Raises:
        RuntimeError: Neither 0 nor 1.
    """
    if mode not in (0, 1):
        raise RuntimeError(
            f"{name}: mode was {mode}; allowed are 0 (weight decay in the gradient) and 1 "
            "(decoupled)."
        )
    return bool(mode)


@contextlib.contextmanager
def flag_to_set(flag: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
    """A one-element flag on ``device``; what is set there in this block is set in ``flag``."""
    first = flag.detach().reshape(-1)[:1]
    if first.numel() != 1:
        raise RuntimeError("The noop_flag is empty; a tensor of one element is needed.")
    if first.device == device:
        yield first
        return
    there = torch.zeros_like(first, device=device)
    yield there
    set_flag(first, there)


def flag_to_read(flag: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The flag, to be read on ``device``; one on the CPU is read here, as it is now."""
    return flag_on(flag.detach().reshape(-1)[:1], device)
