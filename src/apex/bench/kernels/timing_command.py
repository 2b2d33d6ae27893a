"""``apex bench kernels``: times of each operation, ours and those of other packages.

What is timed is in `cases` and `layers`; one row is measured in `timing` by the clocks of `clocks`;
`timing_report` shows the rows.
"""

import argparse
import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from apex.bench.cli import UsageError
from apex.bench.kernels import timing_report
from apex.bench.kernels.cases import DTYPES, OF_LISTS, Case
from apex.bench.kernels.clocks import copy_gb_s
from apex.bench.kernels.layers import OF_LAYERS
from apex.bench.kernels.timing import Row, how_measured, measure
from apex.bench.kernels.timing_report import Report
from apex.bench.options import (
    at_least,
    check_file,
    environment,
    pick_device,
    terminated_like_interrupted,
    unique,
)
from apex.bench.output.files import save
from apex.bench.output.progress import Bar, progress

__all__ = ["HELP", "OPS", "add_arguments", "run"]

HELP = (
    "Time each optimizer step, each operation on lists of tensors, each norm and each loss beside "
    "the same of torch, timm and Liger-Kernel, on the same tensors, taking turns."
)
OPS: tuple[Case, ...] = (*OF_LISTS, *OF_LAYERS)
PEERS = ("timm", "liger_kernel", "triton")  # whose versions matter besides torch's
REPEATS = 30
OK, FAILED, INTERRUPTED = 0, 1, 130  # exit codes
TIMED = "{task.completed} of {task.total} cases"  # beside the progress bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``apex bench kernels``."""
    names = [op.name for op in OPS]
    shapes = unique(name for op in OPS for name in op.shapes)
    parser.add_argument(
        "--op", nargs="+", choices=names, default=names, metavar="OP",
        help=f"which of {' '.join(names)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--shapes", nargs="+", choices=shapes, default=shapes, metavar="SET",
        help=f"which of {' '.join(shapes)}: one large tensor, the 293 of a small transformer, "
        "1,000 tiny ones; for layers and losses 2048x1024, 4096x4096, 2048x32768 (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", nargs="+", choices=list(DTYPES), default=["float32"], metavar="DTYPE",
        help=f"which of {' '.join(DTYPES)} (default: float32)",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=at_least(1), default=REPEATS, metavar="N",
        help="how often each provider is timed (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--full", action="store_true",
        help="take the large sizes on a CPU, too: one tensor of 100 million elements instead of "
        "10 million, and 2048 wide rows instead of 256",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=at_least(1), metavar="N",
        help="threads that torch may use on the CPU (default: torch's choice)",
    )  # fmt: skip
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:N (default: cuda if there is one, else cpu)"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("apex-bench", "kernels.json"), metavar="PATH",
        help="file to write, with a page, a CSV file and plots beside it (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Carry out ``apex bench kernels``.

    Returns:
        0, or 1 if one of our own operations failed, or 130 if the run was interrupted; what was
        finished until then is shown and kept.

    Raises:
        UsageError: An option asks for what cannot be done; nothing was timed.
        ModuleNotFoundError: A package of the ``bench`` extra is missing; nothing was timed.
    """
    for package in ("jinja2", "matplotlib", "rich", "scipy"):  # now and not after minutes of work
        importlib.import_module(package)
    device = pick_device(args.device)
    if args.json.suffix in (".csv", ".html"):
        raise UsageError(f"--json {args.json}: another file gets this name; use one in .json")
    check_file("--json", args.json)
    with _threads(args.threads):
        bench = _Bench(args, device)
        with terminated_like_interrupted():
            # The report says by itself that it is incomplete.
            with suppress(KeyboardInterrupt), progress(Bar, bench.cases, TIMED) as bar:
                bench.measure_all(bar)
            timing_report.show(bench.report(), args.json)
    if not bench.complete:
        return INTERRUPTED
    return FAILED if any(row.problem and row.ours for row in bench.rows) else OK


class _Bench:
    """All cases that the options ask for, and what has come of them so far."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.rows: list[Row] = []
        self.complete = False
        self._file: Path = args.json
        self._device = device
        self._repeats: int = args.repeats
        self._full: bool = args.full or device.type == "cuda"
        ops, wanted = unique(args.op), unique(args.shapes)
        self._plan = [
            (op, name, dtype)
            for op in OPS
            if op.name in ops
            for name in op.shapes
            if name in wanted
            for dtype in unique(args.dtype)
        ]
        if not self._plan:
            takes = [f"{op.name} has {', '.join(op.shapes)}" for op in OPS if op.name in ops]
            raise UsageError(f"--shapes {' '.join(wanted)}: not of --op ({'; '.join(takes)})")
        self.cases = len(self._plan)
        self._options: dict[str, Any] = {
            "op": ops,
            "shapes": wanted,
            "dtype": unique(args.dtype),
            "repeats": args.repeats,
            "full": self._full,
            "device": str(device),
        }
        self._environment = environment(device)
        for peer in PEERS:
            self._environment["versions"][peer] = _version(peer)
        self._how = how_measured(device)
        self._missing: dict[str, list[str]] = {}
        self._copy_gb_s: float | None = None

    def measure_all(self, bar: Bar) -> None:
        if self._device.type == "cuda":
            self._copy_gb_s = copy_gb_s(self._device, self._repeats)
        for number, (op, name, dtype) in enumerate(self._plan, 1):
            case = f"{op.name}, {name}, {dtype}"
            bar.doing(case)
            shapes = op.shapes[name](self._full)
            found = measure(op, name, shapes, dtype, self._device, self._repeats, self._copy_gb_s)
            for provider, package in found.missing.items():
                self._missing.setdefault(package, []).append(f"{op.name}: {provider}")
            self.rows += found.rows
            self.complete = number == len(self._plan)
            self._save()
            bar.done(case)

    def report(self) -> Report:
        return Report(
            environment={**self._environment, "copy_gb_s": self._copy_gb_s},
            options=self._options,
            complete=self.complete,
            missing={package: unique(names) for package, names in self._missing.items()},
            notes=self._how,
            rows=tuple(self.rows),
        )

    def _save(self) -> None:
        save(timing_report.content(self.report()), self._file)


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
