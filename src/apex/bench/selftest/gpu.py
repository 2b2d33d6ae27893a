"""What only a GPU can show: CUDA graphs, steps that never wait, tensors elsewhere, bandwidth.

`captured` and `waits_refused` are all that touches CUDA here; tests put stand-ins in their place.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from apex import amp
from apex.bench import kernel_cases, layer_cases
from apex.bench.clocks import copy_gb_s, take_turns
from apex.bench.kernel_cases import Op
from apex.bench.selftest import optimizers, tensor_ops, training
from apex.bench.selftest.check import DTYPES, Check, Measured, Setting, random, same_again
from apex.bench.selftest.optimizers import VARIANTS, Variant
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam

__all__ = ["captured", "checks", "waits_refused"]

GRAPHS, WAITS, ELSEWHERE, BANDWIDTH = "CUDA graphs", "no waits", "devices", "bandwidth"
LIVE = ("as called", "kernels")  # paths: the definition is plain PyTorch
WARM_UP = 3  # steps on a side stream before a capture, as torch's documentation asks for
REPLAYS = 3
REPEATS = 10  # of a timed call
# Replayed, these draw other random numbers, or count their steps in Python, than step by step.
NOT_CAPTURED = ("storage=stochastic", "apex.contrib")


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
    for variant in VARIANTS:
        dtype = variant.dtypes[0]
        name = f"{variant.name}, {dtype}"
        if not any(word in variant.name for word in NOT_CAPTURED):
            yield Check(GRAPHS, name, _replayed_steps(variant, DTYPES[dtype]), LIVE, gpu=True)
        yield Check(WAITS, name, _steps_without_waits(variant, DTYPES[dtype]), LIVE, gpu=True)
    yield Check(GRAPHS, "forward, backward and step", _replayed_training, LIVE, gpu=True)
    for op in tensor_ops.OPS:
        yield Check(WAITS, op.name, _op_without_waits(op), LIVE, gpu=True)
    for level in training.LEVELS:
        name = f"training at {level}, FusedAdam"
        yield Check(WAITS, name, _training_without_waits(level), LIVE, gpu=True)
    yield Check(ELSEWHERE, "on a GPU that is not the current one", _elsewhere, LIVE, gpu=True)
    for cases, shapes in ((kernel_cases.OPS, "transformer"), (layer_cases.LAYERS, "middle")):
        for case in cases:
            if case.providers[0].bytes_per_element is not None and "both" not in case.name:
                run = _bandwidth(case, shapes)
                yield Check(BANDWIDTH, f"{case.name}, {shapes}", run, ("as called",), gpu=True)


# --- CUDA graphs ----------------------------------------------------------------------------------


def _replayed_steps(
    variant: Variant, dtype: torch.dtype
) -> Callable[[Setting], Iterator[Measured]]:
    """Replays with new gradients end with the bits of as many steps."""

    def run(setting: Setting) -> Iterator[Measured]:
        ends = []
        for in_a_graph in (True, False):
            params, work, refill = _stepping(variant, dtype, setting)
            _repeated(work, refill, setting, in_a_graph)
            ends.append([param.detach() for param in params])
        yield same_again("weights beside single steps", *ends)

    return run


def _replayed_training(setting: Setting) -> Iterator[Measured]:
    """A network of ours as a whole in a graph, learning from new inputs at each replay."""
    ends = []
    for in_a_graph in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), FusedLayerNorm(256), nn.Linear(256, 8))
        model = model.to(setting.device)
        optimizer = FusedAdam(model.parameters(), lr=0.01, capturable=True)
        x = random((32, 64), torch.float32, setting)

        def work(
            model: nn.Module = model, optimizer: FusedAdam = optimizer, x: torch.Tensor = x
        ) -> None:
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()

        def refill(number: int, x: torch.Tensor = x) -> None:
            x.copy_(random((32, 64), torch.float32, setting, seed=number))

        _repeated(work, refill, setting, in_a_graph)
        ends.append([param.detach() for param in model.parameters()])
    yield same_again("weights beside single steps", *ends)


def _repeated(
    work: Callable[[], object],
    refill: Callable[[int], None],
    setting: Setting,
    in_a_graph: bool,
) -> None:
    """Warm up, then repeat with new inputs, in a graph or not."""
    refill(0)
    if in_a_graph:
        again = captured(work, setting.device)
    else:
        again = work
        for _ in range(WARM_UP):
            work()
    for number in range(1, 1 + REPLAYS):
        refill(number)
        again()


def _stepping(
    variant: Variant, dtype: torch.dtype, setting: Setting
) -> tuple[optimizers.Params, Callable[[], None], Callable[[int], None]]:
    """Parameters, a step from gradients that stay where they are, and what refills these."""
    params = optimizers.parameters(setting, dtype)
    optimizer = variant.optimizer(params)
    optimizers.give_grads(params, setting, 1)
    given = [torch.empty_like(param) for param in params]  # a step may change its gradients
    if not variant.larc:
        optimizers.tell(optimizer, 0.0, setting)

    def work() -> None:
        for param, grad in zip(params, given, strict=True):
            assert param.grad is not None
            param.grad.copy_(grad)
        optimizer.step()

    def refill(number: int) -> None:
        fresh = optimizers.gradients(params, setting, 1 + number)
        for grad, new in zip(given, fresh, strict=True):
            grad.copy_(new)

    return params, work, refill


# --- no waits -------------------------------------------------------------------------------------


def _steps_without_waits(
    variant: Variant, dtype: torch.dtype
) -> Callable[[Setting], Iterator[Measured]]:
    def run(setting: Setting) -> Iterator[Measured]:
        _, work, refill = _stepping(variant, dtype, setting)
        refill(0)
        yield from _without_waits(work, setting)

    return run


def _op_without_waits(op: tensor_ops.Op) -> Callable[[Setting], Iterator[Measured]]:
    def run(setting: Setting) -> Iterator[Measured]:
        inputs = op.make(op.shapes[-1], DTYPES[op.dtypes[-1]], setting)
        leaves = [x.requires_grad_(x.is_floating_point()) for x in inputs]
        asked = [x for x in leaves if x.requires_grad]

        def work() -> None:
            y = op.ours(*leaves)
            torch.autograd.grad(y, asked, torch.ones_like(y))

        yield from _without_waits(work, setting)

    return run


def _training_without_waits(level: str) -> Callable[[Setting], Iterator[Measured]]:
    def run(setting: Setting) -> Iterator[Measured]:
        try:
            yield from _without_waits(training.Trainer(level, setting).step, setting)
        finally:
            amp.reset()

    return run


def _without_waits(work: Callable[[], object], setting: Setting) -> Iterator[Measured]:
    """Warm up, then do it twice where a wait raises."""
    for _ in range(WARM_UP):
        work()
    with waits_refused(setting.device):
        for _ in range(2):
            work()
    yield Measured("waits", 0, 0, "waits")  # one would have raised


# --- devices --------------------------------------------------------------------------------------


def _elsewhere(setting: Setting) -> Iterator[Measured]:
    """Launches follow the tensors and not the current device."""
    count = torch.cuda.device_count()
    yield Measured("GPUs", count, None, "")
    if count < 2:
        return
    chosen = [*tensor_ops.checks()][:2] + [*optimizers.checks()][:1]
    with torch.cuda.device(((setting.device.index or 0) + 1) % count):
        for check in chosen:
            yield from check.run(setting)


# --- bandwidth ------------------------------------------------------------------------------------


def _bandwidth(case: Op, shapes: str) -> Callable[[Setting], Iterator[Measured]]:
    """How much of a device copy's bandwidth an operation has; nothing is required of it."""

    def run(setting: Setting) -> Iterator[Measured]:
        sizes, ours = case.shapes[shapes](False), case.providers[0]
        assert ours.bytes_per_element is not None  # or it would not be asked
        call = ours.prepare(case.make(sizes, torch.float32, setting.device))
        for _ in range(WARM_UP):
            call()
        laps = take_turns({"": call}, REPEATS, setting.device)[""]
        moved = ours.bytes_per_element(torch.float32) * sum(map(_product, sizes))
        gb_s = moved / statistics.median(lap.ms for lap in laps) / 1e6
        yield Measured("of a copy", gb_s / _copy_gb_s(setting.device), None, "times")
        yield Measured("bandwidth", gb_s, None, "GB/s")

    return run


@functools.cache
def _copy_gb_s(device: torch.device) -> float:
    return copy_gb_s(device, REPEATS)


def _product(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
