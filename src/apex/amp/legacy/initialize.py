"""Old names of the workers behind ``initialize``, at their old import path."""

from __future__ import annotations

from typing import Any

import torch

from apex.amp.casting.containers import applier
from apex.amp.frontend import initialize
from apex.amp.levels import HALF_TYPES, Properties

__all__ = ["O2StateDictHook", "_initialize", "applier", "to_type"]


def to_type(dtype: torch.dtype, t: Any) -> Any:
    """Cast a floating tensor to ``dtype``; hand ``dtype`` to an object that offers ``to``."""
    if isinstance(t, torch.Tensor):
        return t.to(dtype) if t.is_floating_point() else t
    return t.to(dtype)


class O2StateDictHook:
    """State-dict hook that replaces 16-bit entries by ``fn`` of them.

    Args:
        fn: Takes a tensor, returns what is to stand in the state dict.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __call__(self, module: Any, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        """Replace the entries."""
        for key, value in state_dict.items():
            if isinstance(value, torch.Tensor) and value.dtype in HALF_TYPES:
                state_dict[key] = self.fn(value)


def _initialize(
    models: Any,
    optimizers: Any,
    properties: Properties,
    num_losses: int = 1,
    cast_model_outputs: torch.dtype | None = None,
) -> Any:
    """Run ``initialize`` with the options in ``properties``, which has a level."""
    options = {**properties.options, "cast_model_outputs": cast_model_outputs}
    if not properties.by_list:
        options["patch_torch_functions"] = None
    return initialize(models, optimizers, num_losses=num_losses, verbosity=0, **options)
