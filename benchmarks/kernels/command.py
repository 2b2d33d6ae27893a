"""``python -m benchmarks.kernels``: times of each operation, ours and those of other packages.

What is timed is in `cases`; one row is measured in `timing` by the clocks of `clocks`. Here are the
options, the columns of the table, and the files.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from apex.commands.command_line import UsageError
from apex.commands.info import machine
from apex.commands.options import (
    add_device,
    at_least,
    check_file,
    environment,
    pick_device,
    terminated_like_interrupted,
    unique,
)
from apex.commands.progress import Bar, progress
from apex.commands.tables import (
    NOTHING,
    Column,
    Value,
    console,
    fitted,
    number,
    save,
    span,
    three,
    write_csv,
)
from benchmarks.kernels.cases import DTYPES, OF_LAYERS, OF_LISTS, TimedCase
from benchmarks.kernels.timing import Timing, how_measured, measure

__all__ = ["COLUMNS", "HELP", "NAME", "OPS", "Timings", "add_arguments", "content", "run", "show"]

NAME = "python -m benchmarks.kernels"
FORMAT = f"{NAME} 4"
HELP = (
    "Time each optimizer step, operation on lists of tensors, norm and loss of apex, torch and "
    "Liger-Kernel in turn, on the same tensors."
)
OPS: tuple[TimedCase, ...] = (*OF_LISTS, *OF_LAYERS)
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by torch's allocator of CPU memory
REPEATS = 30
OK, FAILED, INTERRUPTED = 0, 1, 130  # exit codes
TIMED = "{task.completed} of {task.total} cases"  # beside the progress bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``python -m benchmarks.kernels``."""
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


@dataclass
class Timings:
    """What `python -m benchmarks.kernels` has measured so far.

    Attributes:
        environment: Of `apex.commands.options.environment`, with ``huge_pages``, whether torch asks
            Linux for them.
        options: What was asked for.
        notes: How the numbers were taken.
        complete: Whether everything that was asked for was timed.
        missing: Packages that are not installed, with what was not timed for that.
        rows: What was timed.
    """

    environment: dict[str, Any]
    options: dict[str, Any]
    notes: dict[str, str]
    complete: bool = False
    missing: dict[str, list[str]] = field(default_factory=dict)
    rows: list[Timing] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """Carry out ``python -m benchmarks.kernels``.

    Returns:
        0, or 1 if one of our own operations failed, or 130 if the run was interrupted; what was
        finished until then is shown and kept.

    Raises:
        UsageError: An option asks for what cannot be done; nothing was timed.
    """
    device = pick_device(args.device)
    if args.json.suffix == ".csv":
        raise UsageError(f"--json {args.json}: the CSV file gets this name; choose one in .json")
    check_file("--json", args.json)
    plan = _plan(args)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(args.threads or torch.get_num_threads())
        stack.enter_context(terminated_like_interrupted())
        here = environment(device)
        here["versions"]["liger_kernel"] = machine.version_of("liger_kernel")
        here |= {
            "huge_pages": os.environ.get(HUGE_PAGES) == "1",
        }
        named = {name: unique(getattr(args, name)) for name in ("op", "shapes", "dtype")}
        numbers = {"repeats": args.repeats, "full": args.full or device.type == "cuda"}
        options = {**named, **numbers, "device": str(device)}
        report = Timings(environment=here, options=options, notes=how_measured(device))
        with suppress(KeyboardInterrupt), progress(len(plan), TIMED) as bar:
            _measure_all(report, plan, device, args.json, bar)
        show(report, args.json)
    if not report.complete:
        return INTERRUPTED
    return FAILED if any(row.problem and row.ours for row in report.rows) else OK


def _plan(args: argparse.Namespace) -> list[tuple[TimedCase, str, str]]:
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
        raise UsageError(f"--shapes {' '.join(unique(args.shapes))}: no shapes of --op ({takes})")
    return found


def _measure_all(
    report: Timings,
    plan: Sequence[tuple[TimedCase, str, str]],
    device: torch.device,
    file: Path,
    bar: Bar,
) -> None:
    repeats, full = report.options["repeats"], report.options["full"]
    for place, (op, name, dtype) in enumerate(plan, 1):
        case = f"{op.name}, {name}, {dtype}"
        bar.describe(case)
        rows, missing = measure(op, name, op.shapes[name](full), dtype, device, repeats)
        for provider, package in missing.items():
            without = [*report.missing.get(package, []), f"{op.name}: {provider}"]
            report.missing[package] = unique(without)
        report.rows += rows
        report.complete = place == len(plan)
        save(content(report), file)
        bar.finish(case)


# --- output --------------------------------------------------------------------------------------


def content(report: Timings) -> dict[str, Any]:
    """Make what the JSON file has: the fields of the report, and of each row what the CSV has."""
    numbers = {name: of for column in COLUMNS for name, of in column.numbers.items()}
    rows = [{name: of(row) for name, of in numbers.items()} for row in report.rows]
    return {"format": FORMAT, **vars(report), "rows": rows}


def show(report: Timings, file: Path) -> None:
    """Print the tables, and write the CSV file beside ``file``."""
    to = console()
    if not report.rows:
        to.print("Interrupted before the first case was finished: nothing to show.")
        return
    to.print(_source(report), style="bold", markup=False)
    for mark in _marks(report):
        to.print(mark, style="bold red")

    def style(row: Timing) -> str | None:
        return "red" if row.problem else "bold" if row.ours else None

    for shapes, dtype in dict.fromkeys((row.shapes, row.dtype) for row in report.rows):
        rows = [row for row in report.rows if (row.shapes, row.dtype) == (shapes, dtype)]
        table, left_out = fitted(COLUMNS, rows, to, style)
        count = f"{rows[0].tensors:,} tensor{'s' * (rows[0].tensors > 1)}"
        title = f"{shapes}: {count}, {rows[0].elements:,} elements, {dtype}"
        to.print(f"\n{title}", style="italic", markup=False)
        to.print(table)
        if left_out:
            names = f"{', '.join(left_out)} ({file.stem}.csv has all)"
            to.print(f"Columns left out, too wide: {names}.", style="dim", markup=False)
    to.print()
    to.print(_faster(report), markup=False)
    for where, text in (*_problems(report), *report.notes.items()):
        to.print(f"{where}: {text.rstrip('.')}.", markup=False, style="dim")
    write_csv(COLUMNS, report.rows, file.with_suffix(".csv"))
    to.print(f"In {file.parent}: {file.name}, {file.stem}.csv", markup=False)


def _source(report: Timings) -> str:
    """Say what the numbers depend on."""
    here, turns = report.environment, report.options["repeats"]
    threads, versions = here["threads"], here["versions"]
    found = [
        here["device"]["name"],
        f"torch {versions['torch']}, apex {versions['apex']}",
        f"{threads} thread{'s' * (threads > 1)}",
        f"{turns} turn{'s' * (turns > 1)}",
        "THP_MEM_ALLOC_ENABLE=1" if here["huge_pages"] else "",
    ]
    return ", ".join(filter(None, found))


def _marks(report: Timings) -> list[str]:
    found = [] if report.complete else ["INCOMPLETE: interrupted"]
    timed = [row for row in report.rows if row.times]
    unsteady = [row for row in timed if (row.p80_ms or 0) > 2 * (row.p20_ms or 0)]
    if unsteady:
        found.append(f"BUSY MACHINE: {len(unsteady)} of {len(timed)} times vary a lot")
    return found


def _faster(report: Timings) -> str:
    """List what is faster than ours by the clock, in the order of the rows."""
    each = [
        f"{row.op}, {row.shapes}, {row.dtype}: {row.provider} {row.faster:.2f} times"
        for row in report.rows
        if row.faster
    ]
    return f"Faster than apex: {'; '.join(each) or 'nothing'}."


def _problems(report: Timings) -> list[tuple[str, str]]:
    """List what failed, and what is not installed."""
    failed = [
        (f"{row.op}, {row.shapes}, {row.dtype}, {row.provider}", row.problem)
        for row in report.rows
        if row.problem
    ]
    absent = [
        (name, f"not installed (pip install --no-deps {name}); not timed: {', '.join(what)}")
        for name, what in report.missing.items()
    ]
    return failed + absent


# --- columns --------------------------------------------------------------------------------------


def _column(heading: str, name: str, text: Callable[[Any], str], drop: int = 0) -> Column[Timing]:
    """A number of a row."""
    of = attrgetter(name)
    return Column(heading, lambda row: text(of(row)), {name: of}, drop=drop)


def _word(name: str, *, group: bool = False) -> Column[Timing]:
    of = attrgetter(name)
    return Column(name, lambda row: str(of(row)), {name: of}, left=True, group=group)


def _end(name: str) -> Callable[[Timing], Value]:
    """An end of the interval."""
    return lambda row: getattr(row.bounds, name, None)


COLUMNS: tuple[Column[Timing], ...] = (
    *(_word(name, group=True) for name in ("shapes", "dtype", "tensors", "elements")),
    _word("op"),
    _word("provider"),
    _column("ms", "p50_ms", three),
    Column(
        "p20–p80", lambda row: span(row.p20_ms, row.p80_ms),
        {"p20_ms": attrgetter("p20_ms"), "p80_ms": attrgetter("p80_ms")}, drop=4,
    ),
    _column("apex time\n/ its", "ratio", lambda value: number(value, ".2f", "×")),
    Column(
        "95 %\ninterval",
        lambda row: f"{row.bounds.low:.2f}–{row.bounds.high:.2f}" if row.bounds else NOTHING,
        {"ratio_low": _end("low"), "ratio_high": _end("high")}, drop=2,
    ),
    _column("B per\nelement", "bytes_per_element", lambda value: number(value, "g"), 6),
    _column("GB/s", "gb_s", three, 5),
    _column("peak\nMiB", "peak_mib", three, 3),  # of a call, beyond its inputs: modes "both"
    _column("host\nms", "host_ms", three),  # until the call returns, on a GPU
    _column("wall\nms", "wall_ms", three),
    _column("apex wall\n/ its", "wall_ratio", lambda value: number(value, ".2f", "×")),
    _column("launches", "launches", lambda value: number(value, "d"), 6),
    Column(
        "problem", lambda row: (row.problem or "").partition(":")[0],
        {"problem": attrgetter("problem")}, left=True, wraps=True,
    ),
)  # fmt: skip
