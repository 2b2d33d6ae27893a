"""What stands for a GPU on a CPU: ``--dry`` runs the code of checks, times and tests marked gpu.

A graph is recorded and replayed (`tests.recorded_graph`): the Python code of a step does not run
again, and what makes the host wait is refused. Nothing is compiled, and streams do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from apex.amp.graphs import device
from tests.recorded_graph import READS, HostRead, RecordedGraph, like_a_gpu

KEPT = contextlib.ExitStack()  # what lets apex take the CPU for a GPU; never closed
REFUSING = contextlib.ExitStack()  # open while `set_sync_debug_mode` refuses waits


class Stream:
    """A stream on which everything has happened already."""

    cuda_stream = 0

    def __init__(self, *arguments: Any) -> None:
        pass

    def nothing(self, *arguments: Any) -> None:
        """Wait for nothing."""

    wait_stream = wait_event = record_event = synchronize = nothing


class Graph:
    """A recorded graph. What a capture writes and draws is taken back: on CUDA it does nothing."""

    def __init__(self) -> None:
        self.recorded: Any = RecordedGraph()
        self.capturing = contextlib.ExitStack()

    def capture_begin(self, *arguments: Any, **options: Any) -> None:
        """Record from here on."""
        self.random = torch.get_rng_state()
        self.capturing.enter_context(self.recorded.capture())

    def capture_end(self) -> None:
        """Record no more."""
        self.capturing.close()
        self.recorded.take_back()
        torch.set_rng_state(self.random)

    def replay(self) -> None:
        """Call what was recorded again."""
        self.recorded.replay()

    def pool(self) -> None:
        """Memory is that of the CPU."""

    def reset(self) -> None:
        """Forget what was recorded."""
        self.recorded.calls.clear()


@contextlib.contextmanager
def graph(made: Graph, **options: Any) -> Iterator[None]:
    """Record what is called in the block, as ``torch.cuda.graph`` does."""
    made.capture_begin()
    try:
        yield
    finally:
        made.capture_end()


class Event:
    """The time at which the host recorded it."""

    def __init__(self, **options: Any) -> None:
        self.at = 0.0

    def record(self, *arguments: Any) -> None:
        """Look at the clock."""
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds until another."""
        return (end.at - self.at) * 1e3


class ReadsRefused(TorchDispatchMode):
    """Raises where the host would wait for a GPU: for a number, or a shape that data decide."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise HostRead(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class OnACpu(TorchFunctionMode):
    """Takes the CPU where a call names a GPU: for tests that name it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        args, kwargs = tree_map(_of_the_cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_a_cpu() -> Iterator[None]:
    """Take the CPU where the program in the block names a GPU."""
    with contextlib.ExitStack() as stack:
        for kind, name in ((torch.autocast, "device_type"), (torch.amp.GradScaler, "device")):
            moved = _of_a_cpu(kind.__init__, name)
            stack.enter_context(mock.patch.object(kind, "__init__", moved))
        stack.enter_context(OnACpu())
        yield


def _of_a_cpu(init: Any, name: str) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        device = kwargs.pop(name, device)
        init(self, "cpu" if device == "cuda" else device, *args, **kwargs)

    return __init__


def _of_the_cpu(value: Any) -> Any:
    named = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if named else value


def set_sync_debug_mode(mode: str | int) -> None:
    """Refuse waits from here on, or no more."""
    REFUSING.close()
    if mode in ("error", 2):
        REFUSING.enter_context(ReadsRefused())


def get_sync_debug_mode() -> int:
    """2 while waits are refused, as torch's function."""
    return 2 * bool(REFUSING._exit_callbacks)  # type: ignore[attr-defined]


def install() -> None:
    """Put the stand-ins in place, for the rest of this process."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.CUDAGraph, cuda.Event = Stream, Graph, Event
    cuda.graph, cuda.current_stream = graph, Stream
    cuda.stream = cuda.device = lambda *arguments, **options: contextlib.nullcontext()
    cuda.set_sync_debug_mode, cuda.get_sync_debug_mode = set_sync_debug_mode, get_sync_debug_mode
    for name in ("synchronize", "empty_cache", "_sleep", "set_device"):
        setattr(cuda, name, lambda *arguments: None)
    for name in ("reset_peak_memory_stats", "memory_reserved", "max_memory_allocated"):
        setattr(cuda, name, lambda *arguments: 0)
    cuda.get_device_name = lambda *arguments: "dry"
    own = device.DeviceGraph  # with the stand-ins above
    KEPT.enter_context(like_a_gpu())
    device.DeviceGraph = own  # type: ignore[misc]
