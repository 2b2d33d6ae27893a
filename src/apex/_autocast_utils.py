"""What autocast does to the arguments of Apex's layers; names that other packages import."""

from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["_cast_if_autocast_enabled", "_get_autocast_dtypes", "_get_current_dtype"]


def _get_autocast_dtypes() -> list[torch.dtype]:
    """The 16-bit dtypes that autocast may have on this machine's GPU."""
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        return [torch.half]
    return [torch.half, torch.bfloat16]


def _get_current_dtype(dtype: torch.dtype | None = None) -> torch.dtype:
    """Autocast's dtype while it is on for CUDA, else ``dtype``, or float32."""
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return dtype or torch.float32


def _cast_if_autocast_enabled(*args: Any) -> Any:
    """Cast floating CUDA tensors but float64 to autocast's dtype while it is on for CUDA.

    Args:
        *args: Anything; containers are looked into.

    Returns:
        The same, cast or as they are.
    """
    if not torch.is_autocast_enabled("cuda"):
        return args
    dtype = torch.get_autocast_dtype("cuda")
    cast: Any = torch.amp.custom_fwd(_given, device_type="cuda", cast_inputs=dtype)
    return cast(SimpleNamespace(), *args)


def _given(context: Any, *args: Any) -> tuple[Any, ...]:
    return args
