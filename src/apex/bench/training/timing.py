"""How long a step takes, by a clock that suits the device."""

import time
from typing import Protocol

import torch

__all__ = ["Stopwatch", "stopwatch"]


class Stopwatch(Protocol):
    """Takes many times, one after the other."""

    def start(self) -> None:
        """A step begins."""

    def stop(self) -> None:
        """The step is over."""

    def milliseconds(self) -> list[float]:
        """Return the time of every step so far that was stopped."""


class _HostStopwatch:
    """For devices on which a call returns when the work is done."""

    def __init__(self) -> None:
        self._started = 0.0
        self._laps: list[float] = []

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._laps.append(1000 * (time.perf_counter() - self._started))

    def milliseconds(self) -> list[float]:
        return self._laps


class _CudaStopwatch:
    """Times on the GPU's own clock, so that host and GPU go on overlapping as in real training."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._starts: list[torch.cuda.Event] = []
        self._stops: list[torch.cuda.Event] = []

    def start(self) -> None:
        self._starts.append(self._mark())

    def stop(self) -> None:
        self._stops.append(self._mark())

    def milliseconds(self) -> list[float]:
        self._stream.synchronize()
        pairs = zip(self._starts, self._stops, strict=False)  # a step that raised has no stop
        return [start.elapsed_time(stop) for start, stop in pairs]

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def stopwatch(device: torch.device) -> Stopwatch:
    """Choose the clock: on a CUDA device the host's would time launches, or hold up the GPU."""
    return _CudaStopwatch(device) if device.type == "cuda" else _HostStopwatch()
