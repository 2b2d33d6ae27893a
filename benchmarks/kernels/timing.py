"""One row of the table: a provider of an operation, measured beside the others.

All providers work on the same tensors in one process, and take turns. Bytes are those that have to
be moved, as declared, not those that a provider moves.
"""

import math
import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from apex.commands.bench.intervals import Interval, interval, percentile
from apex.commands.bench.memory import peak_bytes, source
from apex.commands.info.clocks import clock, launches, take_turns
from benchmarks.kernels.cases import DTYPES, Call, Provider, Shapes, TimedCase

__all__ = ["Timing", "how_measured", "measure"]

WALL = (
    "what a call is waited for in a program that makes one after the other, at least: the larger "
    "of ms and host ms; a ratio of GPU times says nothing of speed where the host takes longer"
)
WARM_UP = 3  # calls; the first makes an optimizer's state, and compiles kernels


@dataclass(frozen=True)
class Timing:
    """One provider of one operation on one set of tensors; what was not measured is ``None``.

    ``times`` are of each turn, in ms, and ``our_times`` ours in the same turns. The columns of
    `timing_command` say what the other numbers mean.
    """

    op: str
    provider: str
    ours: bool
    shapes: str
    dtype: str
    tensors: int
    elements: int
    times: tuple[float, ...] = ()
    our_times: tuple[float, ...] = ()
    bytes_per_element: float | None = None
    peak_mib: float | None = None
    host_ms: float | None = None
    our_wall_ms: float | None = None
    launches: int | None = None
    problem: str | None = None

    p20_ms = property(lambda row: percentile(row.times, 20))
    p50_ms = property(lambda row: percentile(row.times, 50))
    p80_ms = property(lambda row: percentile(row.times, 80))

    @property
    def wall_ms(self) -> float | None:
        """What somebody waits for a call, where that is not `p50_ms`: on a GPU.

        Calls that follow each other take at least the time of the GPU, and of the host.
        """
        return None if self.host_ms is None else max(self.p50_ms or 0.0, self.host_ms)

    @property
    def wall_ratio(self) -> float | None:
        """Our `wall_ms` divided by this provider's; on a CPU it is `ratio`."""
        if self.wall_ms is None or self.our_wall_ms is None:
            return None
        return self.our_wall_ms / self.wall_ms

    @property
    def faster(self) -> float | None:
        """How many times faster this provider is than ours by the clock, if it is."""
        if self.host_ms is not None:
            return self.wall_ratio if self.wall_ratio and self.wall_ratio > 1 else None
        return self.ratio if self.bounds and self.bounds.low > 1 else None

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

    def _log_ratios(self) -> list[float]:
        """Compare neighbours: what disturbs the machine disturbs both."""
        pairs = zip(self.our_times, self.times, strict=False)  # one of the two may have failed
        return [math.log(our / its) for our, its in pairs if our and its]


def how_measured(device: torch.device) -> dict[str, str]:
    """Say for readers how the numbers of a `Timing` were taken."""
    cuda = device.type == "cuda"
    return {
        "ms": f"by {'CUDA events' if cuda else 'the host clock'}, after {WARM_UP} calls that do "
        "not count; providers take turns on the same tensors, in an order drawn for each turn"
        + (
            ", the L2 cache overwritten before each call, so long that the host has issued it "
            "by then; host ms is what the host took"
            if cuda
            else ""
        ),
        **({"wall ms": WALL} if cuda else {}),
        "GB/s": "from the bytes that have to be moved, which are declared for each provider: an "
        "optimizer with 16-bit state has fewer",
        "peak MiB": f"of one call, beyond its inputs; from {source(device)}",
    }


def measure(
    op: TimedCase,
    name: str,
    shapes: Shapes,
    dtype: str,
    device: torch.device,
    repeats: int,
) -> tuple[list[Timing], dict[str, str]]:
    """Time all providers of an operation on tensors of ``shapes``, a set of that ``name``.

    Returns:
        The rows, and the providers that are not installed with the missing package.
    """
    torch.manual_seed(0)
    inputs = op.make(shapes, DTYPES[dtype], device)
    providers = [one for one in op.providers if one.only_on in (None, device.type)]
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    problems: dict[str, str] = {}
    for provider in providers:
        try:
            calls[provider.name] = _ready(provider, inputs, device)
        except ModuleNotFoundError as error:
            missing[provider.name] = error.name or str(error)
        except Exception as error:  # noqa: BLE001  what one provider cannot do is a result
            problems[provider.name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    time_once = clock(device)
    timers = {who: partial(time_once, call) for who, call in calls.items()}
    taken = take_turns(timers, repeats, shuffled=True)
    times = {who: tuple(one.ms for one in taken[who]) for who in calls}
    first = op.providers[0].name
    cuda = device.type == "cuda"

    host = {who: percentile([one.host_ms for one in taken[who]], 50) for who in calls if cuda}
    our_wall = (
        max(percentile(times[first], 50) or 0.0, host[first] or 0.0) if first in host else None
    )

    def row(provider: Provider) -> Timing:
        who, call = provider.name, calls.get(provider.name)
        moved = provider.bytes_per_element if call else None
        peak = peak_bytes(call, device) if call and op.measure_memory else None
        return Timing(
            op=op.name,
            provider=who,
            ours=who == first,
            shapes=name,
            dtype=dtype,
            tensors=len(shapes),
            elements=sum(math.prod(shape) for shape in shapes),
            times=times.get(who, ()),
            our_times=() if who == first else times.get(first, ()),
            bytes_per_element=moved(DTYPES[dtype]) if moved else None,
            peak_mib=None if peak is None else peak / 2**20,
            host_ms=host.get(who),
            our_wall_ms=None if who == first else our_wall,
            launches=launches(call) if call and cuda else None,
            problem=problems.get(who),
        )

    return [row(one) for one in providers if one.name not in missing], missing


def _ready(provider: Provider, inputs: Any, device: torch.device) -> Call:
    """Make what is timed, and call it a few times: what fails, fails now."""
    call = provider.prepare(inputs)
    for _ in range(WARM_UP):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return call
