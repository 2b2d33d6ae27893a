"""The caller of functions over lists of tensors, those of ``amp_C`` above all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class MultiTensorApply:
    """Call ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.

    Args:
        chunk_size: Argument of every call. apex's functions ignore it and choose their own size.

    Attributes:
        available: Always True, because nothing needs to be compiled.
        warned: Kept from the original; always False.

    Example:
        >>> import amp_C
        >>> flag, x = torch.zeros(1, dtype=torch.int32), [torch.ones(3)]
        >>> multi_tensor_applier(amp_C.multi_tensor_scale, flag, [x, x], 0.5)
        >>> x
        [tensor([0.5000, 0.5000, 0.5000])]
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing. The original raises an error if its extension was not compiled."""

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: torch.Tensor,
        tensor_lists: Sequence[Sequence[torch.Tensor]],
        *args: Any,
    ) -> Any:
        """Call ``op``.

        Args:
            op: A function of ``amp_C``, or one with its conventions.
            noop_flag_buffer: One-element tensor that ``op`` may read or set.
            tensor_lists: Lists of tensors.
            *args: What else ``op`` takes.

        Returns:
            What ``op`` returns.
        """
        self.check_avail()
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
