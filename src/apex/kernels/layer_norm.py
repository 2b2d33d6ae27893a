"""Layer norm on a GPU; see :mod:`apex.ops.layer_norm` for the definition."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from apex.kernels import _row_norms
from apex.kernels._cases import Case

forward = functools.partial(_row_norms.launch_forward, centered=True)
backward = functools.partial(_row_norms.launch_backward, centered=True)


def allocate(
    x: torch.Tensor, weight: Any, bias: Any, shape: Any, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``y``, ``mean`` and ``rstd``, uninitialized."""
    y, rstd = _row_norms.allocate(x, shape, dtype)
    return y, torch.empty_like(rstd), rstd


def cases() -> Iterator[Case]:
    """What is inspected."""
    return _row_norms.cases("layer_norm", centered=True)
