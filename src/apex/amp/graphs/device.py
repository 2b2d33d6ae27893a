"""The CUDA graph of a step, and its stream.

CUDA's rules, each where it is kept:

* Warm-up and capture are on one stream of their own: autograd adds up gradients on the stream that
  a parameter was first used on.
* ``capture_error_mode="thread_local"``: what threads of a loader do to the GPU ends no capture.
* A graph has a private pool of memory, which lives as long as the graph.
* Kernels are chosen alike in warm-up, graph and later calls without it: by the GPU's time, since a
  replay has no host's.
* Random generators are registered, so that each replay draws other numbers. torch registers the
  default one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from apex.ops import prefer


def has_graphs(device: torch.device) -> bool:
    """Whether steps on ``device`` can be captured."""
    return device.type == "cuda"


class DeviceGraph:
    """The graph of one function on a GPU, and the stream for its calls without the graph."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: Any = None

    @contextlib.contextmanager
    def on_its_stream(self) -> Iterator[None]:
        """Run what is in the block on the stream, after what was sent and before what will be."""
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream), prefer("gpu"):
            yield
        here.wait_stream(self._stream)

    def capture(self, work: Callable[[], Any], generators: Sequence[torch.Generator]) -> Any:
        """Capture ``work``, which computes nothing yet; return its result."""
        graph: Any = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        mode: Any = {"capture_error_mode": "thread_local", "stream": self._stream}
        with torch.cuda.graph(graph, **mode), prefer("gpu"):
            found = work()
        here.wait_stream(self._stream)
        self._graph = graph
        return found

    def replay(self) -> None:
        """Send the graph to the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Give the graph and its memory back, when it has run."""
        if self._graph is not None:
            torch.cuda.synchronize(self.device)
        self._graph = None
