"""What a process of `worker` is asked for: to train, to measure models, to try a batch size."""

from collections.abc import Callable, Sequence

import torch

from apex.bench.cli import UsageError
from apex.bench.info.speeds import Speed
from apex.bench.info.speeds import speeds as measured
from apex.bench.training import probe, profiling, tasks, turns
from apex.bench.training.results import Cell, Run
from apex.bench.training.tasks.task import TaskOptions

__all__ = ["fits", "model_bytes", "speeds", "train"]

TELL_AFTER = 0.01  # of the trainings: a message costs them some microseconds

Told = Callable[..., None]


def train(
    told: Told, cells: Sequence[Cell], options: TaskOptions, budget_s: float | None
) -> list[Run]:
    """Train cells of one task, batch size and seed by turns."""
    last = 0.0

    def tell(share: float, line: str | None) -> None:
        nonlocal last
        if line or share - last >= TELL_AFTER:
            last = share
            told(share, line)

    try:
        task = tasks.load(cells[0].task, options)
    except UsageError as error:
        return [Run(cell, "failed", str(error)) for cell in cells]
    return turns.train(cells, task, options.device, tell, budget_s)


def speeds(told: Told, device: torch.device) -> tuple[Speed, ...]:
    """Time a product and a convolution in each dtype."""
    return measured(device)


def model_bytes(told: Told, cells: Sequence[Cell], options: TaskOptions) -> dict[str, object]:
    """Measure the memory of each level on two models."""
    return {cell.label: profiling.model_bytes(cell, options.device) for cell in cells}


def fits(told: Told, cell: Cell, options: TaskOptions, limit_bytes: int) -> Run:
    """Try a few steps of a cell under a limit of memory."""
    try:
        task = tasks.load(cell.task, options)
        return probe.probe(cell, task, options.device, limit_bytes)
    except UsageError as error:
        return Run(cell, "failed", str(error))
