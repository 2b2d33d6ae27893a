"""What the functions of ``amp_C`` take, checked before anything runs: lists, numbers, flags.

The original walks raw memory, so it compares numbers of elements only. Lists are taken here as it
takes them, and messages hold its words, which callers match.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch

from apex.ops import _runtime
from apex.ops.lists import tensor_lists
from apex.ops.lists.metadata import of_metadata
from apex.ops.lists.tensor_lists import TensorList, flag_on, local_parts, refuse_nested, scalar_on

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

Lists = Sequence[Sequence[torch.Tensor]]
_LAYOUT, _DEVICE, _DTYPE, _SHAPE = map(attrgetter, ("layout", "device", "dtype", "shape"))

_NAMES = {
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char",
    torch.uint8: "Byte", torch.bool: "Bool", torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}  # fmt: skip


def entry(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a function of ``amp_C``: no gradients, and called as it is by what is compiled."""
    eager = torch.no_grad()(function)
    uncompiled = _runtime.not_compiled(eager)  # imports the compiler when it is called: 1.5 s

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        chosen = uncompiled if torch.compiler.is_compiling() else eager
        return chosen(*arguments, **keywords)

    return call


def list_function(
    depths: int | tuple[int, ...], numbers: str
) -> Callable[[Callable[[Any], _Result]], Callable[..., _Result]]:
    """Make a function of ``amp_C``, of ``depths`` lists, of one that takes checked arguments.

    ``numbers`` names what follows ``chunk_size``, ``noop_flag`` and ``tensor_lists``.
    """
    names = numbers.split()
    arguments = ["chunk_size", "noop_flag", "tensor_lists", *names]

    def made(function: Callable[[Any], _Result]) -> Callable[..., _Result]:
        name = function.__name__

        @functools.wraps(function)
        def call(*given: Any) -> _Result:
            if len(given) != len(arguments):
                raise TypeError(
                    f"{name}() takes {len(arguments)} arguments ({', '.join(arguments)}) and got "
                    f"{len(given)}."
                )
            _, flag, lists, *values = given
            columns = checked(name, lists, (depths,) if isinstance(depths, int) else depths)
            device = columns[0][0].device
            found = {
                key: _taken(name, key, x, device) for key, x in zip(names, values, strict=True)
            }
            return function(
                SimpleNamespace(columns=columns, device=device, noop_flag=flag, **found)
            )

        kind = inspect.Parameter.POSITIONAL_ONLY
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(argument, kind) for argument in arguments]
        )
        return entry(call)

    return made


_ON_DEVICE = {
    "lr", "weight_decay", "wd", "scale", "inv_scale", "grad_scale", "a", "b", "global_grad_norm",
    "max_grad_norm", "max_global_grad_norm",
}  # fmt: skip
_ON_HOST: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("beta1", "beta2", "epsilon", "momentum", "dampening"), float),
    **dict.fromkeys(("nesterov", "first_run", "wd_after_momentum", "grad_averaging"), bool),
    "bias_correction": lambda value: int(value) == 1,
    "use_nvlamb_python": bool,
    "norm_type": int,
}


def _taken(function: str, name: str, value: Any, device: torch.device) -> Any:
    """What is taken for an argument: numbers, NumPy's scalars and one-element tensors as numbers.

    A tensor that is not on the CPU is read on ``device`` where its name is in ``_ON_DEVICE``.
    """
    if name in _ON_DEVICE:
        return scalar_on(value, device) if isinstance(value, torch.Tensor) else float(value)
    if name == "step":
        if not isinstance(value, torch.Tensor) or value.is_cpu:
            return int(value)
        return value.detach().to(device, non_blocking=device.type != "cpu")
    if name == "mode" and value not in (0, 1):
        raise RuntimeError(
            f"{function}: mode was {value}; allowed are 0 (weight decay in the gradient) and 1 "
            "(decoupled)."
        )
    return _ON_HOST[name](value) if name in _ON_HOST else value


def numbers_of(kind: Any, given: Any) -> Any:
    """The numbers of an update, of the arguments of a function."""
    found = dict(vars(given))
    for ours, theirs in (("eps", "epsilon"), ("use_nvlamb", "use_nvlamb_python")):
        found[ours] = found.get(theirs)
    found["weight_decay"] = found.get("weight_decay", found.get("wd"))
    decoupled = bool(found.get("mode"))
    found |= {"adam_w_mode": decoupled, "adagrad_w_mode": decoupled}
    found["reg_inside_moment"] = not decoupled
    return kind(**{name: found[name] for name in kind.__match_args__ if name in found})


def checked(name: str, lists: Lists, depths: Sequence[int]) -> list[list[torch.Tensor]]:
    """Check lists of tensors; where shapes at a position differ, view the memory in its order.

    Raises:
        RuntimeError: The lists do not fit; the messages are those of the original.
        TypeError: A tensor is nested.
    """
    if len(lists) not in depths:
        wanted = " or ".join(map(str, depths))
        raise RuntimeError(
            f"tensor_lists.size() != depth: {name} needs {wanted} lists of tensors and got "
            f"{len(lists)}."
        )
    for number, tensors in enumerate(lists):
        refuse_nested(f"{name}, list {number}: tensor", tensors)
    columns = [[*local_parts(tensors)] for tensors in lists]
    if _fit_as_they_are(columns):
        return columns
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


@of_metadata
def _fit_as_they_are(columns: Sequence[TensorList]) -> bool:
    """Whether nothing is to be refused or viewed."""
    if not columns[0] or len({*map(len, columns)}) > 1:
        return False
    every = [*chain.from_iterable(columns)]
    shapes = [[*map(_SHAPE, column)] for column in columns]
    return (
        {*map(_LAYOUT, every)} == {torch.strided}
        and len({*map(_DEVICE, every)}) == 1
        and all(dtype.is_floating_point for dtype in {*map(_DTYPE, every)})
        and all(map(_is_taken, every))
        and all(column == shapes[0] for column in shapes)
    )


def _check_tensor(
    name: str, where: str, tensor: torch.Tensor, first: torch.Tensor, of_list_0: torch.Tensor
) -> None:
    if tensor.layout != torch.strided or not _is_taken(tensor):
        raise RuntimeError(
            f"A tensor was not contiguous. {name}, {where}: layout {tensor.layout}, shape "
            f"{tuple(tensor.shape)}. Pass contiguous, channels_last or channels_last_3d tensors."
        )
    if tensor.device != first.device:
        raise RuntimeError(
            "A tensor was not on the same device as the first tensor. "
            f"{name}, {where}: {tensor.device}; the first tensor is on {first.device}."
        )
    if tensor.numel() != of_list_0.numel():
        raise RuntimeError(
            f"Size mismatch: {name}, {where} has {tensor.numel()} elements; the tensor of list 0 "
            f"has {of_list_0.numel()}."
        )
    if not tensor.is_floating_point():
        kind = _NAMES.get(tensor.dtype, str(tensor.dtype))
        raise RuntimeError(
            f"\"{name}\" not implemented for '{kind}' ({where}). Pass a floating type."
        )


def _is_taken(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout)


def _alike(position: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if all(tensor.shape == position[0].shape for tensor in position):
        return position
    return [(x if x.is_contiguous() else x.movedim(1, -1)).view(-1) for x in position]


def one_each(name: str, numbers: torch.Tensor, column: Sequence[torch.Tensor]) -> torch.Tensor:
    """Take a number for each tensor of ``column``: float32 ``(tensors,)`` on its device."""
    if numbers.numel() != len(column):
        raise RuntimeError(f"{name} has {numbers.numel()} elements for {len(column)} tensors.")
    numbers, device = numbers.detach().reshape(-1), column[0].device
    if numbers.is_cpu and device.type == "cuda":  # from pageable memory the host would wait
        numbers = numbers.float().pin_memory()
    return numbers.to(device, torch.float32, non_blocking=device.type != "cpu")


def flag_to_set(flag: torch.Tensor, device: torch.device) -> AbstractContextManager[torch.Tensor]:
    """A one-element flag on ``device``; what is set there in this block is set in ``flag``."""
    first = flag.detach().reshape(-1)[:1]
    if first.numel() != 1:
        raise RuntimeError("The noop_flag is empty; pass a tensor of one element.")
    return tensor_lists.flag_to_set(first, device)


def flag_to_read(flag: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The flag, to be read on ``device``; one on the CPU is read here, as it is now."""
    return flag_on(flag.detach().reshape(-1)[:1], device)
