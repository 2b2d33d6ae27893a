"""Does a batch fit? A few training steps under a limit of memory, in a process of their own.

The limit is on what the training may take beyond what the process had before it, so that the
machine itself never runs out: on a CPU `RLIMIT_DATA`, on a GPU the share that torch's allocator may
use.
"""

from pathlib import Path
from typing import Any

import torch

from apex.bench import cell as cells
from apex.bench.cli import UsageError
from apex.bench.results import Cell, Run
from apex.bench.tasks.task import Task

__all__ = ["probe"]


def probe(cell: Cell, task: Task, device: torch.device, limit_bytes: int) -> Run:
    """Train a few steps at the cell's batch size under the limit; runs in a process of its own."""
    smallest = next(iter(task.loader(1, 0)))
    _limit(limit_bytes, device)
    try:
        batch = _repeated(smallest, cell.batch, device)
        cells.few_steps(cell, task, device, batch)
    except Exception as error:  # noqa: BLE001  what went wrong is the answer
        status = "out of memory" if cells.out_of_memory(error) else "failed"
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Run(cell, status, words)  # type: ignore[arg-type]
    return Run(cell, "ok")


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


def _repeated(batch: Any, times: int, device: torch.device) -> Any:
    """Repeat a batch of one sample along the first dimension."""

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device).repeat(times, *[1] * (tensor.dim() - 1))

    return cells.mapped(batch, repeat)
