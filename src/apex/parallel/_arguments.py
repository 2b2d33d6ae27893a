"""Arguments of the wrapper: what is checked, and what has no effect."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

EXCLUDE = "DistributedDataParallel: {} and {} exclude each other. Pass only one of them."

_TORCHS = {  # arguments of torch's wrapper: what is to be done without them
    "device_ids": "a module computes on the device that it is on",
    "output_device": "a module computes on the device that it is on",
    "find_unused_parameters": "unused parameters need no option",
    "static_graph": "it needs no option",
    "gradient_as_bucket_view": "use retain_allreduce_buffers=True",
    "bucket_cap_mb": "use message_size, a number of elements",
}

_IDLE: dict[str, tuple[Any, str]] = {  # default, and why it is not needed
    "shared_param": (None, "parameters used twice need no option"),
    "num_allreduce_streams": (1, "torch.distributed uses its own streams"),
    "prof": (False, "torch.profiler records collectives"),
}


def refuse(module: Any, others: Mapping[str, Any], message_size: Any) -> None:
    """Raise ``TypeError`` for arguments that do not exist or have another type."""
    for name in others:
        remedy = f": {_TORCHS[name]}" if name in _TORCHS else ""
        raise TypeError(f"DistributedDataParallel has no argument {name}. Leave it out{remedy}.")
    if isinstance(message_size, bool) or not isinstance(message_size, int) or message_size < 0:
        raise TypeError(
            f"DistributedDataParallel: message_size is {message_size!r}; it must be a number of "
            "elements, 0 or more. (The second argument of torch's wrapper, device_ids, is not "
            "needed.)"
        )
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"DistributedDataParallel: module is a {type(module).__name__}; it must be a "
            "torch.nn.Module."
        )


def warn_of_idle(given: Mapping[str, Any]) -> None:
    """Warn of arguments that tuned the original's streams and profiler, and do nothing here."""
    for name, (default, reason) in _IDLE.items():
        if given[name] != default:
            warnings.warn(f"DistributedDataParallel: {name} has no effect: {reason}.", stacklevel=3)


def check_tensors(module: torch.nn.Module, group: Any, *, buffers: bool) -> None:
    """Refuse parameters, and ``buffers`` if asked, that cannot be sent, by name."""
    if torch.distributed.get_rank(group) < 0:
        raise ValueError("DistributedDataParallel: this rank is not in process_group.")
    nccl = torch.distributed.get_backend(group) == "nccl"
    named: list[tuple[str, torch.Tensor]] = [*module.named_parameters()]
    for name, tensor in (*named, *(module.named_buffers() if buffers else ())):
        if hasattr(tensor, "placements"):
            problem, remedy = "a DTensor", "use fully_shard"
        elif torch.nn.parameter.is_lazy(tensor):
            problem, remedy = "without a shape", "run one forward of the lazy module before"
        elif nccl and not tensor.is_cuda:
            problem = f"on {tensor.device}, and the group is nccl"
            remedy = "call module.cuda() before"
        else:
            continue
        raise ValueError(
            f"DistributedDataParallel: '{name}' is {problem}, which cannot be reduced: {remedy}."
        )


def indices(
    module: torch.nn.Module, params: Iterable[torch.nn.Parameter], name: str
) -> tuple[int, ...]:
    """Return the indices of ``params``, the argument ``name``, among those of the module."""
    index = {id(param): number for number, param in enumerate(module.parameters())}
    found = sorted(index.get(id(param), -1) for param in params)
    if -1 in found:
        raise ValueError(
            f"DistributedDataParallel: {name} contains something that is not a parameter of the "
            "module. Pass parameters of the module."
        )
    return tuple(found)
