"""What our tasks share: whole batches in a random order, and packages that may be missing."""

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from apex.bench.cli import UsageError

__all__ = ["Batches", "package"]


class Batches:
    """One epoch: whole batches of the rows of some tensors, in an order drawn from a seed.

    What is left over at the end is left out, so that all steps are alike.

    Args:
        tensors: Of equally many rows, on one device.
        batch_size: Rows in a batch.
        seed: Of the order; it is drawn on the CPU, so that it is the same on every device.
        finish: Makes a batch of the picked rows of each tensor, with a generator of its own for
            what is drawn anew in each epoch; without it they are the batch.

    Raises:
        UsageError: There are fewer rows than ``batch_size``.
    """

    def __init__(
        self,
        tensors: tuple[torch.Tensor, ...],
        batch_size: int,
        seed: int,
        finish: Callable[..., Any] | None = None,
    ) -> None:
        rows = len(tensors[0])
        if batch_size > rows:
            raise UsageError(f"--batch {batch_size}: there are {rows} samples to train on")
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        whole = order[: rows - rows % batch_size].reshape(-1, batch_size)
        self._tensors, self._seed, self._finish = tensors, seed, finish
        self._picked = whole.to(tensors[0].device)

    def __len__(self) -> int:
        return len(self._picked)

    def __iter__(self) -> Iterator[Any]:
        random = torch.Generator().manual_seed(self._seed)
        for picked in self._picked:
            rows = tuple(tensor[picked] for tensor in self._tensors)
            yield rows if self._finish is None else self._finish(*rows, random)


def package(name: str, task: str) -> ModuleType:
    """Import a package that a task needs.

    Raises:
        UsageError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise UsageError(f"--task {task} needs {error.name}: pip install {error.name}") from None
