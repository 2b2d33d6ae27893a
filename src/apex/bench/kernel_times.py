"""``apex bench kernels``: how long each operation takes, ours and everybody else's.

All providers of an operation work on the same tensors in one process, and take turns: one call
each, again and again. So what disturbs the machine disturbs all of them, and the ratio of two
neighbours' times holds where neither time does. What is timed is declared in `kernel_cases` and
`layer_cases`.

* CPU: the host's clock. *Host ms* is the time on as many tensors of one element: what a call costs
  before any data.
* GPU: CUDA events, with the L2 cache overwritten before each call. *Host ms* is the time in which
  the call returns; *launches* are counted by torch's profiler; *of copy* compares bytes per second
  with a copy on the same device in the same run.

Bytes are those that have to be moved, as declared, not those that a provider moves.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from apex.bench import kernel_cases
from apex.bench.cli import UsageError
from apex.bench.kernel_cases import DTYPES, Call, Op, Provider, Shapes
from apex.bench.layer_cases import LAYERS
from apex.bench.memory import peak_bytes, source
from apex.bench.options import (
    at_least,
    check_folder,
    environment,
    pick_device,
    terminated_like_interrupted,
    unique,
)
from apex.bench.results import percentile, save

__all__ = ["HELP", "OPS", "Row", "add_arguments", "measure", "run"]

HELP = (
    "Time each optimizer step, each operation on lists of tensors, each norm and each loss beside "
    "the same of torch, timm and Liger-Kernel, on the same tensors, taking turns."
)
OPS: tuple[Op, ...] = (*kernel_cases.OPS, *LAYERS)
FORMAT = "apex bench kernels 1"
PEERS = ("timm", "liger_kernel", "triton")  # whose versions matter besides torch's
REPEATS = 30
WARM_UP = 3  # calls; the first makes an optimizer's state, and compiles kernels
COPY_BYTES = 2**30  # of the copy that bytes per second are compared with
FLUSH_BYTES = 2**28  # more than any L2 cache has
OK, FAILED, INTERRUPTED = 0, 1, 130  # exit codes


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
        help="on a CPU too, one tensor of 100 million elements and not of 10 million, and 2048 "
        "wide rows and not 256",
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
        help="file to write (default: %(default)s)",
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
    importlib.import_module("rich")  # now and not after minutes of work
    device = pick_device(args.device)
    if args.json.is_dir():
        raise UsageError(f"--json {args.json}: is a folder, and a file is needed")
    check_folder("--json", args.json.parent)
    with _threads(args.threads):
        bench = _Bench(args, device)
        with terminated_like_interrupted():
            with suppress(KeyboardInterrupt):  # the report says by itself that it is incomplete
                bench.measure_all()
            bench.show()
    if not bench.complete:
        return INTERRUPTED
    return FAILED if any(row.problem and row.ours for row in bench.rows) else OK


@dataclass(frozen=True)
class Row:
    """One provider of one operation on one set of tensors.

    Numbers are ``None`` where nothing was measured, or where they have no meaning on the device.
    """

    op: str
    provider: str
    ours: bool
    shapes: str
    dtype: str
    tensors: int
    elements: int
    repeats: int
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    ratio: float | None = None
    """Our time divided by this provider's, the median over the turns: below 1 we are faster."""
    bytes_per_element: float | None = None
    gb_s: float | None = None
    of_copy: float | None = None
    peak_mib: float | None = None
    """Tensor memory of one call beyond its inputs."""
    host_ms: float | None = None
    launches: int | None = None
    problem: str | None = None


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
        self._options = {
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
        self._missing: dict[str, list[str]] = {}
        self._copy_gb_s: float | None = None

    def measure_all(self) -> None:
        if self._device.type == "cuda":
            self._copy_gb_s = copy_gb_s(self._device, self._repeats)
        for number, (op, name, dtype) in enumerate(self._plan, 1):
            print(f"{number}/{len(self._plan)}  {op.name}, {name}, {dtype}", file=sys.stderr)
            shapes = op.shapes[name](self._full)
            found = measure(op, name, shapes, dtype, self._device, self._repeats, self._copy_gb_s)
            for provider, package in found.missing.items():
                self._missing.setdefault(package, []).append(f"{op.name}: {provider}")
            self.rows += found.rows
            self.complete = number == len(self._plan)
            self._save()

    def show(self) -> None:
        console = _console()
        if not self.rows:
            console.print("Interrupted before the first case was finished: nothing to show.")
            return
        here = self._environment
        title = f"{here['device']['name']}, torch {here['versions']['torch']}, "
        title += f"{here['threads']} thread{'s' * (here['threads'] > 1)}, {self._repeats} turns"
        if self._copy_gb_s is not None:
            title += f", copy {self._copy_gb_s:.0f} GB/s"
        console.print(title, style="bold", markup=False)
        if not self.complete:
            console.print("INCOMPLETE: interrupted", style="bold red")
        for key in unique((row.shapes, row.dtype) for row in self.rows):
            console.print(_table([row for row in self.rows if (row.shapes, row.dtype) == key]))
        for line in self._notes():
            console.print(line, markup=False, style="dim")
        console.print(f"In {self._file}", markup=False)

    def _notes(self) -> list[str]:
        return [
            *(
                f"{row.op}, {row.provider}, {row.shapes}, {row.dtype}: {row.problem}"
                for row in self.rows
                if row.problem
            ),
            *(
                f"{package} is not installed (pip install --no-deps {package}); not timed: "
                f"{', '.join(unique(names))}."
                for package, names in self._missing.items()
            ),
            *(f"{name}: {note}." for name, note in how_measured(self._device).items()),
        ]

    def _save(self) -> None:
        content = {
            "format": FORMAT,
            "environment": {**self._environment, "copy_gb_s": self._copy_gb_s},
            "options": self._options,
            "complete": self.complete,
            "missing": {package: unique(names) for package, names in self._missing.items()},
            "notes": how_measured(self._device),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }
        save(content, self._file)


def how_measured(device: torch.device) -> dict[str, str]:
    """Say for readers how the numbers of a `Row` were taken."""
    cuda = device.type == "cuda"
    return {
        "ms": f"by {'CUDA events' if cuda else 'the host clock'}, after {WARM_UP} calls that do "
        "not count; providers take turns on the same tensors, in an order drawn for each turn"
        + (", the L2 cache overwritten before each call" if cuda else ""),
        "apex / it": "our time divided by this provider's, the median over the turns",
        "GB/s": "from the bytes that have to be moved, which are declared for each provider: an "
        "optimizer with 16-bit state has fewer",
        "peak MiB": f"of one call, beyond its inputs; from {source(device)}",
        "host ms": "until the call returns" if cuda else "on as many tensors of one element each",
    }


# --- measuring ------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """The rows of a case, and the providers that are not installed, with the missing package."""

    rows: list[Row]
    missing: dict[str, str]


def measure(
    op: Op,
    name: str,
    shapes: Shapes,
    dtype: str,
    device: torch.device,
    repeats: int,
    copy: float | None = None,
) -> Measured:
    """Time all providers of an operation on the same tensors, taking turns.

    Args:
        op: What to time.
        name: Of the set of shapes.
        shapes: Of the tensors.
        dtype: Of the tensors, by name.
        device: Where they are.
        repeats: How many turns each provider has.
        copy: Gigabytes per second of a copy on the device.
    """
    ready = _prepare(op, shapes, DTYPES[dtype], device)
    laps = take_turns(ready.calls, repeats, device)
    if device.type == "cuda":
        host = {name: [lap.host_ms for lap in mine] for name, mine in laps.items()}
        launches = {name: _launches(call) for name, call in ready.calls.items()}
    else:
        small = _prepare(op, [(1,) * len(shape) for shape in shapes], DTYPES[dtype], device)
        host = {
            name: [lap.ms for lap in mine]
            for name, mine in take_turns(small.calls, repeats, device).items()
        }
        launches = {}
    elements = sum(_product(shape) for shape in shapes)
    first = op.providers[0].name
    rows = []
    for provider in _providers(op, device):
        if provider.name in ready.missing:
            continue
        row = Row(
            op=op.name,
            provider=provider.name,
            ours=provider.name == first,
            shapes=name,
            dtype=dtype,
            tensors=len(shapes),
            elements=elements,
            repeats=repeats,
            problem=ready.problems.get(provider.name),
        )
        if provider.name in laps:
            times = [lap.ms for lap in laps[provider.name]]
            ours = [lap.ms for lap in laps.get(first, [])]
            row = dataclasses.replace(
                row,
                **_numbers(provider, DTYPES[dtype], elements, times, copy),
                ratio=_ratio(ours, times),
                peak_mib=_peak_mib(op, ready.calls[provider.name], device),
                host_ms=percentile(host.get(provider.name, []), 50),
                launches=launches.get(provider.name),
            )
        rows.append(row)
    return Measured(rows, ready.missing)


def _numbers(
    provider: Provider,
    dtype: torch.dtype,
    elements: int,
    times: Sequence[float],
    copy: float | None,
) -> dict[str, Any]:
    p20, p50, p80 = (percentile(times, percent) for percent in (20, 50, 80))
    moved = provider.bytes_per_element(dtype) if provider.bytes_per_element else None
    gb_s = moved * elements / p50 / 1e6 if moved and p50 else None
    return {
        "p20_ms": p20,
        "p50_ms": p50,
        "p80_ms": p80,
        "bytes_per_element": moved,
        "gb_s": gb_s,
        "of_copy": gb_s / copy if gb_s and copy else None,
    }


def _providers(op: Op, device: torch.device) -> list[Provider]:
    return [one for one in op.providers if one.only_on in (None, device.type)]


def _peak_mib(op: Op, call: Call, device: torch.device) -> float | None:
    peak = peak_bytes(call, device) if op.measure_memory else None
    return None if peak is None else peak / 2**20


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    pairs = [(our, their) for our, their in zip(ours, theirs, strict=False) if their]
    return statistics.median(our / their for our, their in pairs) if pairs else None


class _Ready(NamedTuple):
    calls: dict[str, Call]
    missing: dict[str, str]
    problems: dict[str, str]


def _prepare(op: Op, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> _Ready:
    """Make what is timed, and call it a few times: what fails, fails now."""
    torch.manual_seed(0)
    inputs = op.make(shapes, dtype, device)
    ready = _Ready({}, {}, {})
    for provider in _providers(op, device):
        try:
            call = provider.prepare(inputs)
            for _ in range(WARM_UP):
                call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except ModuleNotFoundError as error:
            ready.missing[provider.name] = error.name or str(error)
        except Exception as error:  # noqa: BLE001  what one provider cannot do is a result
            ready.problems[provider.name] = (
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            )
        else:
            ready.calls[provider.name] = call
    return ready


class Lap(NamedTuple):
    """One timed call."""

    ms: float
    host_ms: float


def take_turns(
    calls: Mapping[str, Call], repeats: int, device: torch.device
) -> dict[str, list[Lap]]:
    """Time every call ``repeats`` times, one after the other and not one many times.

    The order is drawn anew for each turn: who follows a provider of small needs finds the tensors
    in the cache, and memory that was just given back.
    """
    time_once = _cuda_clock(device) if device.type == "cuda" else _host_clock
    laps: dict[str, list[Lap]] = {name: [] for name in calls}
    draw = random.Random(0)  # the same order in each run
    for _ in range(repeats):
        for name in draw.sample(list(calls), len(calls)):
            laps[name].append(time_once(calls[name]))
    return laps


def _host_clock(call: Call) -> Lap:
    begin = time.perf_counter()
    call()
    ms = 1000 * (time.perf_counter() - begin)
    return Lap(ms, ms)


def _cuda_clock(device: torch.device) -> Callable[[Call], Lap]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def time_once(call: Call) -> Lap:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        flush.zero_()  # also keeps the GPU at work until the call's first launch has arrived
        start.record()
        begin = time.perf_counter()
        call()
        host = 1000 * (time.perf_counter() - begin)
        stop.record()
        stop.synchronize()
        return Lap(start.elapsed_time(stop), host)

    return time_once


def copy_gb_s(device: torch.device, repeats: int) -> float:
    """Measure a copy from memory to memory: gigabytes read and written per second."""
    source = torch.zeros(COPY_BYTES, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"copy": lambda: target.copy_(source)}
    target.copy_(source)
    laps = take_turns(calls, repeats, device)["copy"]
    return 2 * COPY_BYTES / statistics.median(lap.ms for lap in laps) / 1e6


def _launches(call: Call) -> int:
    """Count the kernels of a call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(
        str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset"))
        for event in profiler.events()
    )


def _product(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


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


# --- table ----------------------------------------------------------------------------------------

NOTHING = "—"


class _Column(NamedTuple):
    heading: str
    cell: Callable[[Row], str]
    left: bool = False


COLUMNS = (
    _Column("op", lambda row: row.op, left=True),
    _Column("provider", lambda row: row.provider, left=True),
    _Column("ms", lambda row: _three(row.p50_ms)),
    _Column("p20–p80", lambda row: f"{_three(row.p20_ms)}–{_three(row.p80_ms)}"),
    _Column("apex / it", lambda row: _number(None if row.ours else row.ratio, ".2f")),
    _Column("B/element", lambda row: _number(row.bytes_per_element, "g")),
    _Column("GB/s", lambda row: _three(row.gb_s)),
    _Column("of copy", lambda row: _number(row.of_copy, ".0%")),
    _Column("peak MiB", lambda row: _three(row.peak_mib)),
    _Column("host ms", lambda row: _three(row.host_ms)),
    _Column("launches", lambda row: _number(row.launches, "d")),
    _Column("", lambda row: "failed" if row.problem else "", left=True),
)


def _table(rows: Sequence[Row]) -> Any:
    from rich import box
    from rich.table import Table

    first = rows[0]
    count = f"{first.tensors:,} tensor{'s' * (first.tensors > 1)}"
    title = f"{first.shapes}: {count}, {first.elements:,} elements, {first.dtype}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    empty = {NOTHING, ""}
    columns = [column for column in COLUMNS if {column.cell(row) for row in rows} - empty]
    for column in columns:
        table.add_column(column.heading, justify="left" if column.left else "right", no_wrap=True)
    for row in rows:
        style = "red" if row.problem else "bold" if row.ours else None
        table.add_row(*(column.cell(row) for column in columns), style=style)
    return table


def _console() -> Any:
    from rich.console import Console

    # Rich takes a file or a pipe to be 80 wide, which would break long rows.
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Console(width=wide, highlight=False)


def _number(value: float | None, spec: str) -> str:
    return NOTHING if value is None else f"{value:{spec}}"


def _three(value: float | None) -> str:
    """Show at least three digits."""
    if value is None:
        return NOTHING
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"
