"""What is measured apart from the timed training, because watching takes time.

Memory and operators come from torch's profiler over a few steps: on a CPU its record of the
allocator, on a GPU the allocator's own peak; the time of each operator, by dtype.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from apex import amp
from apex.commands.bench import memory
from apex.commands.bench.training.results import Cell, Operator
from apex.commands.bench.training.rows import BASELINE
from apex.commands.bench.training.tasks.task import Task
from apex.commands.bench.training.trainer import Trainer, mapped

__all__ = ["FEW_STEPS", "measure", "operators"]

FEW_STEPS = 3  # the first makes the optimizer's state; from the second on all is in place
HOST_STEPS = 20
PROFILED_STEPS = 5
MOST_OPERATORS = 24
DTYPES = {"float": "float32", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
          "double": "float64"}  # fmt: skip


def measure(
    cell: Cell, task: Task, device: torch.device, batch: Any, *, stopped: bool = False
) -> dict[str, Any]:
    """Measure in trainings of a few steps, beside which nothing else runs.

    Of a level that was stopped because it is slow, only the operators, which say why.

    Returns:
        Fields of `Run`.
    """

    def begun() -> Callable[[], object]:
        """A step of a training that has made the optimizer's state."""
        trainer = Trainer(cell, task, device)
        trainer.step(mapped(batch, torch.Tensor.clone))
        return lambda: trainer.step(mapped(batch, torch.Tensor.clone))

    def train() -> None:
        step = begun()
        for _ in range(FEW_STEPS - 1):
            step()

    if stopped:
        return {"operators": operators(begun(), device)}
    untrained = None
    if cell.level == BASELINE and task.accuracy is not None:
        untrained = Trainer(cell, task, device).measure(task.accuracy)
    peak = memory.peak_bytes(train, device)
    amp.reset()
    step, times = begun(), []
    for _ in range(HOST_STEPS if device.type == "cuda" else 0):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - begin))
    return {
        "host_ms": statistics.median(times) if times else None,
        "peak_bytes": peak,
        "untrained": untrained,
        "operators": operators(step, device),
    }


def operators(step: Callable[[], object], device: torch.device) -> tuple[Operator, ...]:
    """Time the operators of a step, each without those that it calls; the mean of some steps.

    Args:
        step: What to look at.
        device: On a GPU the time is that of the kernels that an operator launches.

    Returns:
        At most `MOST_OPERATORS`, the longest first.
    """
    with memory.profiled(cuda=device.type == "cuda", record_shapes=True) as profile:
        for _ in range(PROFILED_STEPS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = memory.events_of(profile)
    calls = [e for e in events if e.get("cat") == "cpu_op" and "dur" in e]
    times = _of_kernels(events) if device.type == "cuda" else _of_their_own(calls)
    totals: dict[tuple[str, str], float] = defaultdict(float)
    for place, call in enumerate(calls):
        kind = (call.get("args") or {}).get("Input type") or []
        dtype = next((DTYPES[name] for name in kind if name in DTYPES), "")
        key = call["args"].get("External id") if device.type == "cuda" else place
        totals[str(call["name"]).removeprefix("aten::"), dtype] += times.get(key, 0.0) / 1000
    each = {key: ms / PROFILED_STEPS for key, ms in totals.items()}
    longest = sorted(each.items(), key=lambda item: -item[1])[:MOST_OPERATORS]
    return tuple(Operator(name, dtype, ms) for (name, dtype), ms in longest if ms > 0)


def _of_their_own(calls: Sequence[dict[str, Any]]) -> dict[Any, float]:
    """Microseconds of each call without the calls inside of it, by its place in the list."""
    times = {place: float(call["dur"]) for place, call in enumerate(calls)}
    order = sorted(times, key=lambda i: (calls[i]["tid"], float(calls[i]["ts"]), -times[i]))
    own = dict(times)
    around: list[int] = []
    for place in order:
        call = calls[place]
        while around:
            outer = calls[around[-1]]
            end = float(outer["ts"]) + float(outer["dur"])
            if outer["tid"] == call["tid"] and float(call["ts"]) < end:
                break
            around.pop()
        if around:
            own[around[-1]] -= times[place]
        around.append(place)
    return own


def _of_kernels(events: Sequence[dict[str, Any]]) -> dict[Any, float]:
    """Microseconds of the kernels that each call launched, by its external id."""
    times: dict[Any, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "kernel":
            times[event["args"].get("External id")] += float(event["dur"])
    return times
