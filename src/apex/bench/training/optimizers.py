"""The optimizers that `apex bench` trains with, by the names of its option."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from apex import optimizers
from apex.bench.catalogue import optimizers as catalogue

__all__ = ["OPTIMIZERS", "make"]

# Lower case is torch's.
OPTIMIZERS: dict[str, Mapping[str, float]] = {
    "sgd": {"lr": 0.05, "momentum": 0.9},
    "adam": {"lr": 0.005},
    "adamw": {"lr": 0.005, "weight_decay": 0.01},
    **{one.title: one.training for one in catalogue.OPTIMIZERS if one.training},
}
_TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def make(name: str, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Make one of `OPTIMIZERS` with this learning rate and its own other numbers."""
    kind: Any = _TORCH[name] if name in _TORCH else getattr(optimizers, name)
    made: torch.optim.Optimizer = kind(parameters, **{**OPTIMIZERS[name], "lr": lr})
    return made
