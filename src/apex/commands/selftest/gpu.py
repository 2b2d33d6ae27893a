"""What only a GPU can show: CUDA graphs, steps that never wait, tensors elsewhere.

`captured` and `waits_refused` are all that touches CUDA here; tests put stand-ins in their place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from apex import amp
from apex._compat import private
from apex.catalogue.entry import DTYPES, Op, random
from apex.catalogue.optimizers import Optimizer, Variant
from apex.commands.selftest import ops, optimizers, training
from apex.commands.selftest.check import Check, Measured, Setting, same
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam

__all__ = ["captured", "checks", "waits_refused"]

GRAPHS, WAITS, ELSEWHERE = "CUDA graphs", "no waits", "devices"
WARM_UP = 3  # steps on a side stream before a capture, as torch's documentation asks for
REPLAYS = 3
# Replayed, these draw other random numbers, or count their steps in Python, than step by step.
NOT_CAPTURED = ("storage=stochastic", "apex.contrib")
COUNTS_ON_HOST = "FusedAdamSWA"  # its averages, so it reads whether a step is skipped

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


WARNED = "Synchronization debug mode is a prototype"  # torch's warning of the mode


@contextmanager
def waits_refused(device: torch.device | None = None) -> Iterator[None]:
    """Let everything raise that makes the host wait for the GPU, or copies from pageable memory.

    torch warns of its own mode, also where warnings are errors. Afterwards the mode is as before.
    """
    torch.cuda.synchronize(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", WARNED)
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
        rare = optimizers.special(optimizer, variant)
        if not any(word in name for word in NOT_CAPTURED):
            yield live(GRAPHS, name, partial(_replayed, stepping), rare=rare)
        if COUNTS_ON_HOST not in name:
            yield live(WAITS, name, partial(_without_waits, stepping), rare=rare)
    yield live(GRAPHS, "forward, backward and step", partial(_replayed, _learning))
    for op in ops.CHECKED:
        run = partial(_without_waits, partial(_differentiated, op))
        yield live(WAITS, op.title, run, subject=f"{op.title}, {op.dtypes[-1]}")
    for level in training.LEVELS:
        trained = partial(_without_waits, partial(training.SmallTraining, level))
        yield live(WAITS, f"training at {level}, FusedAdam", trained)
    if torch.cuda.device_count() > 1:
        yield live(ELSEWHERE, "on a GPU that is not the current one", _elsewhere)


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
    params = optimizers.parameters(setting, DTYPES[variant.dtypes[0]], variant)
    made = optimizers.made(optimizer, variant, params)
    grads = [torch.empty_like(param) for param in params]
    given = optimizers.gradients(params, setting, 0)  # a step may change its gradients
    optimizers.give(params, grads)
    if not variant.larc:
        optimizers.tell(made, 0.0, setting)

    def work() -> None:
        private.foreach_copy_(grads, given)
        made.step()

    def refill(number: int) -> None:
        private.foreach_copy_(given, optimizers.gradients(params, setting, number))

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


def _differentiated(op: Op, setting: Setting) -> Callable[[], object]:
    leaves, rest = op.inputs(op.checked.small[-1], DTYPES[op.dtypes[-1]], setting.device)
    leaves = [x.requires_grad_() for x in leaves]

    def work() -> None:
        y = op.ours(*leaves, *rest)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    return work


def _without_waits(make: Callable[[Setting], Any], setting: Setting) -> Iterator[Measured]:
    """Warm up, then do it twice where a wait raises."""
    try:
        made = make(setting)
        work = made[1] if isinstance(made, tuple) else getattr(made, "step", made)
        for _ in range(WARM_UP):
            work()
        with waits_refused(setting.device):
            for _ in range(2):
                work()
        yield Measured("waits", 0, 0, "waits")  # one would have raised
    finally:
        amp.reset()


def _elsewhere(setting: Setting) -> Iterator[Measured]:
    """Launches follow the tensors and not the current device."""
    with torch.cuda.device(((setting.device.index or 0) + 1) % torch.cuda.device_count()):
        for check in [*ops.checks()][:2] + [*optimizers.checks()][:1]:
            yield from check.run(setting)
