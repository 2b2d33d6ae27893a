"""RMS norm on a GPU; see :mod:`apex.ops.rms_norm` for the definition."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from apex.kernels import _row_norms
from apex.kernels._cases import Case

backward = functools.partial(_row_norms.launch_backward, centered=False)


def allocate(
    x: torch.Tensor, weight: Any, shape: Any, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y`` and ``rstd``, uninitialized."""
    return _row_norms.allocate(x, shape, dtype)


def forward(
    x: torch.Tensor, weight: Any, shape: Any, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y`` and ``rstd``."""
    y, _, rstd = _row_norms.launch_forward(x, weight, None, shape, eps, dtype, centered=False)
    return y, rstd


def cases() -> Iterator[Case]:
    """What is inspected."""
    return _row_norms.cases("rms_norm", centered=False)
