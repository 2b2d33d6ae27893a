"""``apex bench kernels``: times of each operation, ours and those of other packages.

What is timed is in `cases`; one row is measured in `timing` by the clocks of `clocks`;
`timing_report` shows the rows.
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from apex.bench.cli import UsageError
from apex.bench.info import machine
from apex.bench.kernels import timing_report
from apex.bench.kernels.cases import DTYPES, OF_LAYERS, OF_LISTS, Case
from apex.bench.kernels.clocks import copy_gb_s
from apex.bench.kernels.timing import how_measured, measure
from apex.bench.kernels.timing_report import Report
from apex.bench.options import (
    add_device,
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
    "the same of torch and Liger-Kernel, on the same tensors, taking turns."
)
OPS: tuple[Case, ...] = (*OF_LISTS, *OF_LAYERS)
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by torch's allocator of CPU memory
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
    add_device(parser)
    parser.add_argument(
        "--json", type=Path, default=Path("apex-bench", "kernels.json"), metavar="PATH",
        help="file to write, with a CSV file beside it (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Carry out ``apex bench kernels``.

    Returns:
        0, or 1 if one of our own operations failed, or 130 if the run was interrupted; what was
        finished until then is shown and kept.

    Raises:
        UsageError: An option asks for what cannot be done; nothing was timed.
    """
    device = pick_device(args.device)
    if args.json.suffix == ".csv":
        raise UsageError(f"--json {args.json}: another file gets this name; use one in .json")
    check_file("--json", args.json)
    plan = _plan(args)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(args.threads or torch.get_num_threads())
        stack.enter_context(terminated_like_interrupted())
        report = _nothing_yet(args, device)
        with suppress(KeyboardInterrupt), progress(len(plan), TIMED) as bar:
            _measure_all(report, plan, device, args.json, bar)
        timing_report.show(report, args.json)
    if not report.complete:
        return INTERRUPTED
    return FAILED if any(row.problem and row.ours for row in report.rows) else OK


def _plan(args: argparse.Namespace) -> list[tuple[Case, str, str]]:
    """The cases that the options ask for, with a set of shapes and a dtype each."""
    ops = [op for op in OPS if op.name in args.op]
    found = [
        (op, name, dtype)
        for op in ops
        for name in op.shapes
        if name in args.shapes
        for dtype in unique(args.dtype)
    ]
    if not found:
        takes = "; ".join(f"{op.name} has {', '.join(op.shapes)}" for op in ops)
        raise UsageError(f"--shapes {' '.join(unique(args.shapes))}: not of --op ({takes})")
    return found


def _nothing_yet(args: argparse.Namespace, device: torch.device) -> Report:
    found = environment(device)
    found["versions"]["liger_kernel"] = machine.version_of("liger_kernel")
    return Report(
        environment={**found, "huge_pages": os.environ.get(HUGE_PAGES) == "1", "copy_gb_s": None},
        options={
            "op": unique(args.op),
            "shapes": unique(args.shapes),
            "dtype": unique(args.dtype),
            "repeats": args.repeats,
            "full": args.full or device.type == "cuda",
            "device": str(device),
        },
        notes=how_measured(device),
    )


def _measure_all(
    report: Report,
    plan: Sequence[tuple[Case, str, str]],
    device: torch.device,
    file: Path,
    bar: Bar,
) -> None:
    repeats, full = report.options["repeats"], report.options["full"]
    copy = copy_gb_s(device, repeats) if device.type == "cuda" else None
    report.environment["copy_gb_s"] = copy
    for number, (op, name, dtype) in enumerate(plan, 1):
        case = f"{op.name}, {name}, {dtype}"
        bar.describe(case)
        found = measure(op, name, op.shapes[name](full), dtype, device, repeats, copy)
        for provider, package in found.missing.items():
            said = [*report.missing.get(package, []), f"{op.name}: {provider}"]
            report.missing[package] = unique(said)
        report.rows += found.rows
        report.complete = number == len(plan)
        save(timing_report.content(report), file)
        bar.finish(case)
