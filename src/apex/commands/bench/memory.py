"""How many bytes of tensors a piece of work needs at its peak, measured on the device itself.

On a CUDA device torch's allocator keeps that number. On a CPU it keeps none, but the profiler
records every allocation and every release with the allocator's running total, so the peak of that
record is a measurement too. What libraries allocate behind torch's back (scratch space of the
convolution library, the interpreter itself) is in neither number.

Not the resident set of the process: it never shrinks, a level that runs second would look free,
and Windows has no equal of it.
"""

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["events_of", "peak_bytes", "profiled", "source"]


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Run ``work`` once and measure the bytes of tensors in use at its peak, beyond the start.

    Memory that it releases before it returns counts, as does memory that it keeps. ``None`` where
    there is no way to measure.
    """
    gc.collect()  # what earlier work left in cycles would be released in the middle of the record
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    with profiled(profile_memory=True) as profile:
        work()
    return _peak_of_record(events_of(profile))


def source(device: torch.device) -> str:
    """Say in a few words where `peak_bytes` has its number from."""
    return {
        "cpu": "torch's CPU allocator, as the profiler records it",
        "cuda": "torch.cuda.max_memory_allocated",
    }.get(device.type, "not measured")


def events_of(profile: Any) -> list[dict[str, Any]]:
    """Read the events that torch's profiler has recorded."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        # Bytes, not text: names in the trace may be in the machine's own encoding.
        events = json.loads(trace.read_bytes().decode(errors="replace"))["traceEvents"]
    return list(events)


def _peak_of_record(events: list[dict[str, Any]]) -> int | None:
    """Find the peak among the trace's ``[memory]`` events, above the total before the first one."""
    record = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    if not record:
        return None
    record.sort(key=lambda event: float(event["ts"]))
    first = record[0]["args"]
    # The allocator still counts what an earlier profile saw and what is not released yet.
    before = int(first["Total Allocated"]) - int(first["Bytes"])
    return max(before, *(int(event["args"]["Total Allocated"]) for event in record)) - before


@contextmanager
def profiled(*, cuda: bool = False, **options: Any) -> Iterator[Any]:
    """Run torch's profiler without the words of its engine on standard error.

    That reads a variable when it is first used in the process, and offers nothing else.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        with profile(activities=activities, **options) as found:
            yield found
    finally:
        if before is None:
            del os.environ[name]
