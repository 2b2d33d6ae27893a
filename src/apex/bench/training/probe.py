"""Does a batch fit? A few training steps under a limit of memory, in a process of their own.

The limit is on what the training may take beyond what the process had before it, so that the
machine itself never runs out: on a CPU `RLIMIT_DATA`, on a GPU the share that torch's allocator may
use.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from apex import amp
from apex.bench.cli import UsageError
from apex.bench.training import trainer
from apex.bench.training.results import Cell, Run
from apex.bench.training.tasks.task import Task

__all__ = ["probe"]


def probe(cell: Cell, task: Task, device: torch.device, limit_bytes: int) -> Run:
    """Train a few steps at the cell's batch size under the limit; runs in a process of its own."""
    try:
        one, two = (next(iter(task.loader(size, 0))) for size in (1, 2))
        _few_small_steps(cell, device)
        _limit(limit_bytes, device)
        batch = _repeated(one, two, cell.batch, device)
        trainer.few_steps(cell, task, device, batch)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  what went wrong is the answer
        status = "out of memory" if trainer.out_of_memory(error) else "failed"
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Run(cell, status, words)  # type: ignore[arg-type]
    return Run(cell, "ok")


def _few_small_steps(cell: Cell, device: torch.device) -> None:
    """Let torch load what trainings need: 150 MiB on a CPU, which would be under the limit."""
    small = Task()
    small.model = lambda: torch.nn.Linear(1, 1)  # type: ignore[method-assign]
    small.loss = lambda model, batch: model(batch).float().mean()  # type: ignore[method-assign]
    few = dataclasses.replace(cell, compile=False)
    trainer.few_steps(few, small, device, torch.ones(1, 1, device=device))
    amp.reset()


def _limit(limit_bytes: int, device: torch.device) -> None:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        used = torch.cuda.memory_reserved(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, (used + limit_bytes) / total), device)
        return
    try:
        import resource

        lines = Path("/proc/self/status").read_text().splitlines()
        size = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    except (ImportError, OSError, StopIteration):
        raise UsageError("--batch max: memory can be limited on Linux and on GPUs only") from None
    limit = 1024 * size + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _repeated(one: Any, two: Any, times: int, device: torch.device) -> Any:
    """Repeat a batch of one sample along the dimensions in which one of two is twice as long.

    Raises:
        ValueError: There is none: any number of samples would seem to fit.
    """
    pairs = iter(tree_leaves(two))
    repeated = []

    def repeat(leaf: Any) -> Any:
        other = next(pairs)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        twice = [dim for dim in range(leaf.dim()) if other.shape[dim] == 2 * leaf.shape[dim] > 0]
        repeated.extend(twice[:1])
        counts = [times if dim in twice[:1] else 1 for dim in range(leaf.dim())]
        return leaf.to(device).repeat(counts)

    batch = tree_map(repeat, one)
    if not repeated:
        raise ValueError("no tensor of the loader's batch of 2 is twice as long as in one of 1")
    return batch
