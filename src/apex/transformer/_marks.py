"""Parameters with attributes of the program's, such as whose part of a weight they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apex._compat import private


class Marked(torch.nn.Module):
    """Sets attributes of its parameters again where torch makes new ones, which have none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        private.need("tensor_parallel")
        super().__init__(*args, **kwargs)

    def _mark(self) -> None:
        """Set the attributes."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:  # copy.deepcopy, torch.load
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:  # from the meta device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:  # with assign=True
        super()._load_from_state_dict(*args)
        self._mark()
