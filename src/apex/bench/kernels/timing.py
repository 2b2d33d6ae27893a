"""One row of `apex bench kernels`: a provider of an operation, measured beside the others.

All providers work on the same tensors in one process, and take turns. Bytes are those that have to
be moved, as declared, not those that a provider moves.
"""

import math
import os
import statistics
from dataclasses import dataclass
from typing import NamedTuple

import torch

from apex.bench.intervals import Interval, interval, percentile
from apex.bench.kernels.cases import DTYPES, Case, Provider, Shapes
from apex.bench.kernels.clocks import Call, launches, take_turns
from apex.bench.memory import peak_bytes, source

__all__ = ["HUGE_PAGES", "Measured", "Row", "how_measured", "measure"]

WARM_UP = 3  # calls; the first makes an optimizer's state, and compiles kernels
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by torch's allocator of CPU memory


@dataclass(frozen=True)
class Row:
    """One provider of one operation on one set of tensors; what was not measured is ``None``.

    The columns of `timing_columns` say what they mean.
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
    huge_pages: bool
    """Whether torch asks Linux for huge pages: THP_MEM_ALLOC_ENABLE=1."""
    times: tuple[float, ...] = ()
    """In ms, of each turn; empty where the provider failed."""
    our_times: tuple[float, ...] = ()
    """Ours in the same turns, beside another provider's."""
    bytes_per_element: float | None = None
    copy_gb_s: float | None = None
    peak_mib: float | None = None
    host_ms: float | None = None
    launches: int | None = None
    problem: str | None = None

    p20_ms = property(lambda row: percentile(row.times, 20))
    p50_ms = property(lambda row: percentile(row.times, 50))
    p80_ms = property(lambda row: percentile(row.times, 80))

    @property
    def ratio(self) -> float | None:
        """Our time divided by this provider's, the geometric mean of the turns."""
        logs = self._log_ratios()
        return math.exp(statistics.fmean(logs)) if logs else None

    @property
    def bounds(self) -> Interval | None:
        """The 95 % interval of `ratio`; ``None`` of fewer than three turns."""
        return interval(self._log_ratios())

    @property
    def gb_s(self) -> float | None:
        """The bytes that have to be moved, by the median time."""
        moved, ms = self.bytes_per_element, self.p50_ms
        return moved * self.elements / ms / 1e6 if moved and ms else None

    @property
    def of_copy(self) -> float | None:
        """The same divided by that of a copy."""
        return self.gb_s / self.copy_gb_s if self.gb_s and self.copy_gb_s else None

    def _log_ratios(self) -> list[float]:
        """Compare neighbours: what disturbs the machine disturbs both."""
        pairs = zip(self.our_times, self.times, strict=False)  # one of the two may have failed
        return [math.log(our / its) for our, its in pairs if our and its]


def how_measured(device: torch.device) -> dict[str, str]:
    """Say for readers how the numbers of a `Row` were taken."""
    cuda = device.type == "cuda"
    return {
        "ms": f"by {'CUDA events' if cuda else 'the host clock'}, after {WARM_UP} calls that do "
        "not count; providers take turns on the same tensors, in an order drawn for each turn"
        + (", the L2 cache overwritten before each call" if cuda else ""),
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
    copy_gb_s: float | None = None,
) -> Measured:
    """Time all providers of an operation on tensors of ``shapes``, a set of that ``name``."""
    ready = _prepare(op, shapes, DTYPES[dtype], device)
    laps = take_turns(ready.calls, repeats, device)
    host = laps
    if device.type != "cuda":
        small = _prepare(op, [(1,) * len(shape) for shape in shapes], DTYPES[dtype], device)
        host = take_turns(small.calls, repeats, device)
    first = op.providers[0].name

    def times(name: str) -> tuple[float, ...]:
        return tuple(lap.ms for lap in laps.get(name, ()))

    def row(provider: Provider) -> Row:
        moved, call = provider.bytes_per_element, ready.calls.get(provider.name)
        ours = provider.name == first
        return Row(
            op=op.name,
            provider=provider.name,
            ours=ours,
            shapes=name,
            dtype=dtype,
            tensors=len(shapes),
            elements=sum(math.prod(shape) for shape in shapes),
            repeats=repeats,
            threads=torch.get_num_threads(),
            huge_pages=os.environ.get(HUGE_PAGES) == "1",
            times=times(provider.name),
            our_times=() if ours else times(first),
            bytes_per_element=moved(DTYPES[dtype]) if moved and call else None,
            copy_gb_s=copy_gb_s,
            peak_mib=_peak_mib(call, device) if op.measure_memory and call else None,
            host_ms=percentile([lap.host_ms for lap in host.get(provider.name, ())], 50),
            launches=launches(call) if call and device.type == "cuda" else None,
            problem=ready.problems.get(provider.name),
        )

    providers = [p for p in _providers(op, device) if p.name not in ready.missing]
    return Measured([row(provider) for provider in providers], ready.missing)


def _providers(op: Case, device: torch.device) -> list[Provider]:
    return [one for one in op.providers if one.only_on in (None, device.type)]


def _peak_mib(call: Call, device: torch.device) -> float | None:
    peak = peak_bytes(call, device)
    return None if peak is None else peak / 2**20


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
            said = " ".join(str(error).split())
            ready.problems[provider.name] = f"{type(error).__name__}: {said}"
        else:
            ready.calls[provider.name] = call
    return ready
