"""What the functions of a step read of an optimizer, :class:`apex.optimizers._base.FusedOptimizer`.

Its docstrings say what each is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

Written = list[tuple[torch.Tensor, int, torch.Tensor]]  # weight, its version, what is beside it


class Stepped(Protocol):
    """An optimizer, as its step sees it."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    state: defaultdict[torch.Tensor, Any]
    slot_shapes: ClassVar[Mapping[str, Callable[[torch.Tensor], Sequence[int]]]]
    storage: str
    _state_form: str
    _joins_groups: bool
    _mastered: frozenset[torch.dtype]

    @property
    def _name(self) -> str: ...

    @property
    def _written(self) -> Written: ...

    def _slots_of(self, group: Mapping[str, Any], /) -> tuple[str, ...]: ...

    def _master_or(self, param: torch.Tensor, /) -> torch.Tensor: ...

    def _states_of(
        self, params: Sequence[torch.Tensor], slots: tuple[str, ...], /
    ) -> list[dict[str, Any]]: ...
