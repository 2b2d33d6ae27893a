"""Weights that somebody else has written: what is stored beside them follows.

Beside a weight are a master, or the column of a storage; see :mod:`apex.ops.lists.storage`.
"""

from __future__ import annotations

import torch

from apex.ops.lists.storage import AUTO, LOW_BITS, STORAGES
from apex.optimizers import _checks
from apex.optimizers._stepped import Stepped, Written


def extra_key(optimizer: Stepped) -> str | None:
    """The key of what belongs to a weight as it was stored last."""
    storage = LOW_BITS if optimizer.storage == AUTO else STORAGES[optimizer.storage]
    column = storage.column
    return column or ("master_param" if optimizer._mastered else None)


def versions(optimizer: Stepped) -> Written:
    """Of each parameter its version now, and what is stored beside it."""
    name = extra_key(optimizer)
    return [
        (param, param._version, state[name])
        for param, state in optimizer.state.items()
        if isinstance(param, torch.Tensor) and name in state
    ]


def follow_written(optimizer: Stepped) -> None:
    """Let what belongs to a weight follow if somebody else has written it since our last step."""
    name, written = extra_key(optimizer), optimizer._written
    for number, (param, version, column) in enumerate(written):
        if param._version == version or optimizer.state.get(param, {}).get(name) is not column:
            continue
        _checks.written_in_capture(optimizer._name, name)
        if name != "master_param":
            column.zero_()
        elif column.shape == param.shape:
            weight = param.detach()
            column.copy_(torch.where(column.to(weight.dtype) == weight, column, weight))
        written[number] = param, param._version, column
