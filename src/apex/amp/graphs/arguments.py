"""Arguments and results of a captured step: their kind, and copies of them.

A graph reads the memory of its capture. So the tensors among the arguments are copied into tensors
of the graph's own, and everything else (structure, shapes, numbers, modules) is a part of the key:
calls with another key do not replay.
"""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Arguments that are no tensors: equal ones mean the same to the function.
_CONSTANTS = (
    int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, slice, range, enum.Enum,
)  # fmt: skip
# What means the same as long as it is the same object.
_OBJECTS = (torch.nn.Module, torch.optim.Optimizer, types.FunctionType, types.MethodType, type)


class Unfollowed(Exception):
    """A graph cannot follow this argument; the text says why."""


def key_of(value: Any, tensors: list[torch.Tensor]) -> Any:
    """What has to be equal for a replay, and the tensors that are copied.

    Raises:
        Unfollowed: It could change without this key.
    """
    kind = type(value)
    if kind is torch.Tensor:
        if value.requires_grad or value.layout is not torch.strided:
            raise Unfollowed(
                "a tensor among the arguments requires gradients, which a replay would leave to "
                "its copy"
                if value.requires_grad
                else f"a tensor of layout {value.layout}"
            )
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device
    if kind is tuple or kind is list or isinstance(value, tuple):
        return kind, *[key_of(item, tensors) for item in value]
    if isinstance(value, Mapping):
        return kind, *[(name, key_of(item, tensors)) for name, item in value.items()]
    if isinstance(value, _OBJECTS):
        return kind, id(value)
    if isinstance(value, _CONSTANTS):
        return kind, str(value) if kind in (slice, float) else value  # 0.0 == -0.0
    raise Unfollowed(
        f"an argument is a {kind.__name__}, in which a graph does not find its tensors. Pass "
        "tensors, numbers, and tuples, lists and dicts of them"
    )


def replaced(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """``value`` with ``tensors`` instead of its own, in the order of :func:`key_of`."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        items = [replaced(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)
        for name, item in value.items():
            made[name] = replaced(item, tensors)
        return made
    return value


def each(results: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change every tensor of ``results``: a tensor, or containers of some.

    Raises:
        TypeError: Something else is there, which each replay would return unchanged.
    """
    if isinstance(results, torch.Tensor):
        return change(results)

    def changed(leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        raise TypeError(
            f"amp.capture: the function returned {leaf!r} ({type(leaf).__name__}). Replays run no "
            "Python code, so all would return that. Return tensors, such as loss.detach(), or "
            "None; read numbers outside of the function."
        )

    return pytree.tree_map(changed, results)


def surroundings() -> tuple[Any, ...]:
    """The modes of the thread that decide what a function computes."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_autocast_dtype("cpu"),
    )
