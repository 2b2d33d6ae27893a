"""A bucket: gradients that are reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apex.ops.flat import unflatten


class Bucket:
    """Parameters whose gradients are reduced together, and the flat copy that is sent.

    The copy is kept from pass to pass: fresh memory cost a CPU 5 ms for 16 MB. It ends with a
    number for each parameter, 1 where this rank has its gradient.

    Args:
        params: Of one dtype and device, at least one.
        dtype: Of the flat copy.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.params = list(params)
        self.size = sum(param.numel() for param in params)
        self.flat = params[0].new_empty(self.size + len(params), dtype=dtype)
        self.values, self.flags = self.flat[: self.size], self.flat[self.size :]
        self.views = unflatten(self.flat, params)
        self.work: Any = None
        self.grads: list[torch.Tensor | None] = []
        self.has_all = True

    def fill(self, without: set[int]) -> None:
        """Copy the gradients into the flat copy, zeros for those that are missing.

        Args:
            without: ids of parameters that count as missing: their gradients are reduced already.
        """
        self.flags.fill_(1.0)
        self.grads = [None if id(param) in without else param.grad for param in self.params]
        present = [grad for grad in self.grads if grad is not None]
        self.has_all = len(present) == len(self.params)
        views = self.views
        if not self.has_all:
            views = []
            for place, (grad, view) in enumerate(zip(self.grads, self.views, strict=True)):
                if grad is None:
                    view.zero_()
                    self.flags[place].zero_()
                else:
                    views.append(view)
        if present:
            torch._foreach_copy_(views, present)

    def lost(self) -> list[torch.nn.Parameter]:
        """Parameters whose gradient was replaced or dropped since it was sent."""
        both = zip(self.params, self.grads, strict=True)
        return [param for param, grad in both if grad is not None and param.grad is not grad]

    def write_back(self) -> None:
        """Copy what was reduced into the gradients; a rank that had none gets one."""
        if self.has_all:
            torch._foreach_copy_([grad for grad in self.grads if grad is not None], self.views)
        else:
            used = self.flags.tolist()
            for param, grad, view, count in zip(
                self.params, self.grads, self.views, used, strict=True
            ):
                if grad is not None:
                    grad.copy_(view)
                elif count and param.grad is None:
                    param.grad = torch.empty_like(param).copy_(view)
        self.grads = []
