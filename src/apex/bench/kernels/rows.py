"""One row of `apex bench kernels`: a provider of an operation, measured beside the others.

All providers work on the same tensors in one process, and take turns. *Host ms* is, on a CPU, the
time on as many tensors of one element: what a call costs before any data; on a GPU the time in
which the call returns. *Launches* are counted by torch's profiler; *of copy* compares bytes per
second with a copy on the same device in the same run. Bytes are those that have to be moved, as
declared, not those that a provider moves.
"""

import dataclasses
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from apex.bench.intervals import interval, percentile
from apex.bench.kernels.cases import DTYPES, Call, Case, Provider, Shapes
from apex.bench.kernels.clocks import launches, take_turns
from apex.bench.kernels.model import Model
from apex.bench.memory import peak_bytes, source

__all__ = ["FORMAT", "HUGE_PAGES", "Measured", "Report", "Row", "how_measured", "measure"]


FORMAT = "apex bench kernels 2"
WARM_UP = 3  # calls; the first makes an optimizer's state, and compiles kernels
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by torch's allocator of CPU memory


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
    threads: int
    """That torch may use on the CPU."""
    huge_pages: bool
    """Whether torch asks Linux for huge pages: THP_MEM_ALLOC_ENABLE=1."""
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    speed: float | None = None
    """Ours: this provider's time divided by our own in the same turn, the geometric mean over the
    turns: above 1 ours is faster."""
    speed_low: float | None = None
    speed_high: float | None = None
    """The 95 % interval of ``speed`` over its ``repeats`` turns; ``None`` of fewer than three."""
    bytes_per_element: float | None = None
    gb_s: float | None = None
    of_copy: float | None = None
    peak_mib: float | None = None
    """Tensor memory of one call beyond its inputs."""
    host_ms: float | None = None
    launches: int | None = None
    model: Model | None = None
    """Of ours on a GPU that is not here; never a time."""
    problem: str | None = None

    @property
    def ratio(self) -> float | None:
        """Our time divided by this provider's, which is what readers see: below 1 ours is faster.

        The JSON file has its inverse, ``speed``.
        """
        return self.speed and 1 / self.speed

    @property
    def ratio_low(self) -> float | None:
        """The lower end of its interval."""
        return self.speed_high and 1 / self.speed_high

    @property
    def ratio_high(self) -> float | None:
        """The upper end."""
        return self.speed_low and 1 / self.speed_low


@dataclass(frozen=True)
class Report:
    """What `apex bench kernels` writes; its JSON Schema is kernels.schema.json beside this file."""

    environment: dict[str, Any]
    """Of `apex.bench.options.environment`, with ``copy_gb_s``: of a copy on a GPU."""
    options: dict[str, Any]
    """What was asked for."""
    complete: bool
    """Whether everything that was asked for was timed."""
    missing: dict[str, list[str]]
    """Packages that are not installed, with what was not timed for that."""
    notes: dict[str, str]
    """How the numbers were taken."""
    rows: tuple[Row, ...]


def how_measured(device: torch.device) -> dict[str, str]:
    """Say for readers how the numbers of a `Row` were taken."""
    cuda = device.type == "cuda"
    return {
        "ms": f"by {'CUDA events' if cuda else 'the host clock'}, after {WARM_UP} calls that do "
        "not count; providers take turns on the same tensors, in an order drawn for each turn"
        + (", the L2 cache overwritten before each call" if cuda else ""),
        "our time / its": "our time divided by this provider's in the same turn, the geometric "
        "mean over the turns and its 95 % interval: below 1 ours is faster (the JSON file has the "
        "inverse, speed)",
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
    op: Case,
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
        counted = {name: launches(call) for name, call in ready.calls.items()}
    else:
        small = _prepare(op, [(1,) * len(shape) for shape in shapes], DTYPES[dtype], device)
        host = {
            name: [lap.ms for lap in mine]
            for name, mine in take_turns(small.calls, repeats, device).items()
        }
        counted = {}
    elements = sum(math.prod(shape) for shape in shapes)
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
            threads=torch.get_num_threads(),
            huge_pages=os.environ.get(HUGE_PAGES) == "1",
            problem=ready.problems.get(provider.name),
        )
        if provider.name in laps:
            times = [lap.ms for lap in laps[provider.name]]
            ours = [lap.ms for lap in laps.get(first, [])]
            row = dataclasses.replace(
                row,
                **_numbers(provider, DTYPES[dtype], elements, times, copy),
                **({} if row.ours else _speed(ours, times)),
                peak_mib=_peak_mib(op, ready.calls[provider.name], device),
                host_ms=percentile(host.get(provider.name, []), 50),
                launches=counted.get(provider.name),
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


def _providers(op: Case, device: torch.device) -> list[Provider]:
    return [one for one in op.providers if one.only_on in (None, device.type)]


def _peak_mib(op: Case, call: Call, device: torch.device) -> float | None:
    peak = peak_bytes(call, device) if op.measure_memory else None
    return None if peak is None else peak / 2**20


def _speed(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Compare neighbours: what disturbs the machine disturbs both."""
    pairs = zip(ours, theirs, strict=False)  # ours may have failed
    logs = [math.log(their / our) for our, their in pairs if our and their]
    if not logs:
        return {}
    found = interval(logs)
    if found is None:
        return {"speed": math.exp(statistics.fmean(logs))}
    return {"speed": found.value, "speed_low": found.low, "speed_high": found.high}


class _Ready(NamedTuple):
    calls: dict[str, Call]
    missing: dict[str, str]
    problems: dict[str, str]


def _prepare(op: Case, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> _Ready:
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
