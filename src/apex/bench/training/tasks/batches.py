"""What our tasks share: whole batches in a random order, and packages that may be missing."""

import importlib
from collections.abc import Iterator
from types import ModuleType

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

    Raises:
        UsageError: There are fewer rows than ``batch_size``.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...], batch_size: int, seed: int) -> None:
        rows = len(tensors[0])
        if batch_size > rows:
            raise UsageError(f"--batch {batch_size}: there are {rows} samples to train on")
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        whole = order[: rows - rows % batch_size].reshape(-1, batch_size)
        self._tensors = tensors
        self._picked = whole.to(tensors[0].device)

    def __len__(self) -> int:
        return len(self._picked)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for picked in self._picked:
            yield tuple(tensor[picked] for tensor in self._tensors)


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
