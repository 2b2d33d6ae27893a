"""A float16 model with float32 inputs and outputs, as in the first releases of 2018."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apex.amp.casting import cpu_float16

__all__ = ["FP16_Module", "conversion_helper", "fp16_to_fp32", "fp32_to_fp16"]


def conversion_helper(val: Any, conversion: Callable[[Any], Any]) -> Any:
    """Apply ``conversion`` to ``val``, or to what is in it if it is a list or tuple.

    Args:
        val: Anything; lists and tuples may be nested, and keep their types, named tuples too.
        conversion: Called with everything that is no list or tuple.
    """
    if not isinstance(val, (list, tuple)):
        return conversion(val)
    items = [conversion_helper(item, conversion) for item in val]
    return type(val)(*items) if hasattr(val, "_fields") else type(val)(items)


def fp32_to_fp16(val: Any) -> Any:
    """Convert float32 tensors to float16, in nested lists and tuples too; the rest is unchanged.

    Example:
        >>> a, b = fp32_to_fp16((torch.ones(2), torch.tensor([7])))
        >>> a.dtype, b.dtype
        (torch.float16, torch.int64)
    """
    return conversion_helper(val, lambda item: _cast(item, torch.float32, torch.float16))


def fp16_to_fp32(val: Any) -> Any:
    """Convert float16 tensors to float32, in nested lists and tuples too; the rest is unchanged."""
    return conversion_helper(val, lambda item: _cast(item, torch.float16, torch.float32))


def _cast(item: Any, old: torch.dtype, new: torch.dtype) -> Any:
    return item.to(new) if isinstance(item, torch.Tensor) and item.dtype == old else item


class FP16_Module(torch.nn.Module):
    """``module.half()``, with float32 inputs cast to float16 and float16 outputs to float32.

    Keys of the state dict begin with ``module.``. Batch norms become float16 too.

    Args:
        module: The model; it is converted in place.

    Example:
        >>> model = FP16_Module(torch.nn.Linear(4, 2))
        >>> model(torch.ones(1, 4)).dtype
        torch.float32
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module.half()
        cpu_float16.begin(torch.float16, {param.device.type for param in module.parameters()})

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; keyword arguments are passed on as they are."""
        return fp16_to_fp32(self.module(*fp32_to_fp16(inputs), **kwargs))
