"""What only a GPU can show: CUDA graphs, steps that never wait, tensors elsewhere, bandwidth.

`captured` and `waits_refused` are all that touches CUDA here; tests put stand-ins in their place.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from apex import amp
from apex.bench.catalogue.entry import DTYPES, Op, random
from apex.bench.catalogue.optimizers import Optimizer, Variant
from apex.bench.kernels.cases import OF_LAYERS, OF_LISTS, Case
from apex.bench.kernels.clocks import copy_gb_s, take_turns
from apex.bench.selftest import ops, optimizers, training
from apex.bench.selftest.check import Check, Measured, Setting, same
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam

__all__ = ["captured", "checks", "waits_refused"]

GRAPHS, WAITS, ELSEWHERE, BANDWIDTH = "CUDA graphs", "no waits", "devices", "bandwidth"
WARM_UP = 3  # steps on a side stream before a capture, as torch's documentation asks for
REPLAYS = 3
REPEATS = 10  # of a timed call
# Replayed, these draw other random numbers, or count their steps in Python, than step by step.
NOT_CAPTURED = ("storage=stochastic", "apex.contrib")

# Parameters, what steps them, and what gives the next step other inputs, by their number.
Stepped = tuple[list[nn.Parameter], Callable[[], None], Callable[[int], None]]


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Do ``work`` three times on a side stream, capture it in a CUDA graph, return the replay.

    The streams are made here and on ``device``: torch keeps a default one for captures, on the
    device of the first.
    """
    with torch.cuda.device(device):
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                work()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            work()

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay


@contextmanager
def waits_refused(device: torch.device) -> Iterator[None]:
    """Let everything raise that makes the host wait for the GPU, or copies from pageable memory."""
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def checks() -> Iterator[Check]:
    """The checks of this module."""
    live = partial(Check, paths=("as called", "kernels"), gpu=True)  # not the definition
    for optimizer, variant in optimizers.EVERY:
        name = f"{optimizer.called(variant)}, {variant.dtypes[0]}"
        stepping = partial(_stepping, optimizer, variant)
        if not any(word in name for word in NOT_CAPTURED):
            yield live(GRAPHS, name, partial(_replayed, stepping))
        yield live(WAITS, name, partial(_without_waits, partial(_only_step, stepping)))
    yield live(GRAPHS, "forward, backward and step", partial(_replayed, _learning))
    for op in ops.CHECKED:
        yield live(WAITS, op.title, partial(_without_waits, partial(_differentiated, op)))
    for level in training.LEVELS:
        trained = partial(_without_waits, partial(_trained, level))
        yield live(WAITS, f"training at {level}, FusedAdam", trained)
    yield live(ELSEWHERE, "on a GPU that is not the current one", _elsewhere)
    for cases, shapes in ((OF_LISTS, "transformer"), (OF_LAYERS, "middle")):
        for case in cases:
            if case.providers[0].bytes_per_element is not None and "both" not in case.name:
                run = partial(_bandwidth, case, shapes)
                yield Check(BANDWIDTH, f"{case.name}, {shapes}", run, ("as called",), gpu=True)


# --- CUDA graphs ----------------------------------------------------------------------------------


def _replayed(make: Callable[[Setting], Stepped], setting: Setting) -> Iterator[Measured]:
    """Replays with new inputs end with the bits of as many steps."""
    ends = []
    for in_a_graph in (True, False):
        params, work, refill = make(setting)
        again = captured(work, setting.device) if in_a_graph else work
        for _ in range(0 if in_a_graph else WARM_UP):
            work()
        for number in range(1, 1 + REPLAYS):
            refill(number)
            again()
        ends.append([param.detach() for param in params])
    yield same("weights beside single steps", *ends)


def _stepping(optimizer: Optimizer, variant: Variant, setting: Setting) -> Stepped:
    """Step from gradients that stay where they are."""
    params = optimizers.parameters(setting, DTYPES[variant.dtypes[0]])
    made = optimizers.made(optimizer, variant, params)
    grads = [torch.empty_like(param) for param in params]
    given = optimizers.gradients(params, setting, 0)  # a step may change its gradients
    optimizers.give(params, grads)
    if not variant.larc:
        optimizers.tell(made, 0.0, setting)

    def work() -> None:
        torch._foreach_copy_(grads, given)
        made.step()

    def refill(number: int) -> None:
        torch._foreach_copy_(given, optimizers.gradients(params, setting, number))

    return params, work, refill


def _learning(setting: Setting) -> Stepped:
    """A network of ours as a whole, learning from other inputs each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), FusedLayerNorm(256), nn.Linear(256, 8))
    model.to(setting.device)
    optimizer = FusedAdam(model.parameters(), lr=0.01, capturable=True)
    x = random((32, 64), torch.float32, setting.device)

    def work() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    def refill(number: int) -> None:
        x.copy_(random((32, 64), torch.float32, setting.device, seed=number))

    return [*model.parameters()], work, refill


# --- no waits -------------------------------------------------------------------------------------


def _only_step(make: Callable[[Setting], Stepped], setting: Setting) -> Callable[[], object]:
    return make(setting)[1]


def _trained(level: str, setting: Setting) -> Callable[[], object]:
    return training.Trainer(level, setting).step


def _differentiated(op: Op, setting: Setting) -> Callable[[], object]:
    leaves, rest = op.inputs(op.small[-1], DTYPES[op.dtypes[-1]], setting.device)
    leaves = [x.requires_grad_() for x in leaves]

    def work() -> None:
        y = op.ours(*leaves, *rest)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    return work


def _without_waits(
    make: Callable[[Setting], Callable[[], object]], setting: Setting
) -> Iterator[Measured]:
    """Warm up, then do it twice where a wait raises."""
    try:
        work = make(setting)
        for _ in range(WARM_UP):
            work()
        with waits_refused(setting.device):
            for _ in range(2):
                work()
        yield Measured("waits", 0, 0, "waits")  # one would have raised
    finally:
        amp.reset()


# --- devices and bandwidth ------------------------------------------------------------------------


def _elsewhere(setting: Setting) -> Iterator[Measured]:
    """Launches follow the tensors and not the current device."""
    count = torch.cuda.device_count()
    yield Measured("GPUs", count, None, "")
    if count < 2:
        return
    with torch.cuda.device(((setting.device.index or 0) + 1) % count):
        for check in [*ops.checks()][:2] + [*optimizers.checks()][:1]:
            yield from check.run(setting)


def _bandwidth(case: Case, shapes: str, setting: Setting) -> Iterator[Measured]:
    """How much of a device copy's bandwidth an operation has; nothing is required of it."""
    sizes, ours = case.shapes[shapes](False), case.providers[0]
    assert ours.bytes_per_element is not None  # or it would not be asked
    call = ours.prepare(case.make(sizes, torch.float32, setting.device))
    for _ in range(WARM_UP):
        call()
    laps = take_turns({"": call}, REPEATS, setting.device)[""]
    moved = ours.bytes_per_element(torch.float32) * sum(torch.Size(s).numel() for s in sizes)
    gb_s = moved / statistics.median(lap.ms for lap in laps) / 1e6
    yield Measured("of a copy", gb_s / _copy_gb_s(setting.device), None, "times")
    yield Measured("bandwidth", gb_s, None, "GB/s")


@functools.cache
def _copy_gb_s(device: torch.device) -> float:
    return copy_gb_s(device, REPEATS)
