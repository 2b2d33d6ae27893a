"""Export of a report to TensorBoard, by `torch.utils.tensorboard`."""

import importlib
from pathlib import Path

from apex.bench.cli import UsageError
from apex.bench.options import check_folder
from apex.bench.training.results import Report, Run

__all__ = ["check", "write"]


def check(folder: Path) -> None:
    """Try what `write` needs, now and not after minutes of work.

    Raises:
        UsageError: The package ``tensorboard`` is not installed, or the folder cannot be written.
    """
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        raise UsageError("--tensorboard needs tensorboard: pip install tensorboard") from None
    check_folder("--tensorboard", folder)


def write(report: Report, folder: Path) -> None:
    """Write a TensorBoard run for each run: loss, loss scale and step time, and the accuracy.

    Args:
        report: What was measured.
        folder: For ``tensorboard --logdir``; a folder for each run is made in it.
    """
    from torch.utils.tensorboard import SummaryWriter

    for run in report.runs:
        with SummaryWriter(str(folder / _name(run))) as writer:
            curves = {"loss": run.losses, "loss scale": run.scales, "step ms": run.step_ms}
            for name, values in curves.items():
                for step, value in enumerate(values, 1):
                    writer.add_scalar(name, value, step)
            for epoch, value in enumerate(run.accuracy, 1):
                step = epoch * run.steps_per_epoch
                writer.add_scalar("accuracy %", value, step)


def _name(run: Run) -> str:
    """Name the folder; a user's task has a path in its name."""
    cell = run.cell
    words = f"{cell.task} {cell.label} batch {cell.batch} seed {cell.seed}"
    return "".join(c if c.isalnum() or c in "-." else "_" for c in words)
