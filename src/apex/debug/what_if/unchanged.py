"""A block after which modules are what they were, bit for bit, whatever happened in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def unchanged(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Give modules back their attributes, and their parameters and buffers their values.

    What is inside of other objects that they hold (a list that grows) is not known.
    """
    every = list({id(m): m for one in modules for m in one.modules()}.values())
    attributes = [(one, dict(vars(one)), _copies(one)) for one in every]
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for one in every:
        for tensor in (*one._parameters.values(), *one._buffers.values()):
            if tensor is not None and not torch.nn.parameter.is_lazy(tensor):
                tensors.setdefault(id(tensor), (tensor, tensor.detach().clone()))
    try:
        yield
    finally:
        for one, before, tables in attributes:
            vars(one).clear()
            vars(one).update(before)
            for name, table in tables.items():
                getattr(one, name).clear()
                getattr(one, name).update(table)
        with torch.no_grad():
            for tensor, value in tensors.values():
                if not torch.equal(tensor.detach(), value):
                    tensor.data.copy_(value)


def _copies(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    return {name: dict(getattr(module, name)) for name in _TABLES}
