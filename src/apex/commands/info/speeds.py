"""How fast each dtype is here: a matrix product, and a convolution forward and backward.

That a CPU has instructions for a type does not make all of torch's kernels use them: with float16's
instructions the gradient of a convolution takes torch up to 270 times float32's time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch.nn.functional import conv2d

from apex.amp.casting import cpu_float16
from apex.catalogue.entry import random
from apex.commands.info.clocks import Call, clock, take_turns

__all__ = ["OPERATIONS", "Speed", "speeds", "times_of_float32"]

Under = Literal["torch", "amp"]

_What = tuple[str, Under, str]  # dtype, who computes it, operation

KINDS: tuple[tuple[str, Under], ...] = (
    ("float32", "torch"), ("float16", "torch"), ("float16", "amp"), ("bfloat16", "torch")
)  # fmt: skip
TURNS = 5  # at least, after a first; the best counts: a disturbance only slows
SECONDS = 0.7  # of turns, where more than that many fit
TOO_SLOW_MS = 150.0  # a 16-bit type that takes longer is called once
# By type of device: the side of the matrices, and the images of the convolution, 32 channels of
# 32x32, for 64. On a CPU 8 images can take float16's backward 1.3 s.
SIZES = {"cpu": (512, 4), "cuda": (4096, 256)}


@dataclass(frozen=True)
class Speed:
    """The time of an operation; ``ms`` is ``None`` where torch cannot do it.

    ``under`` is who computes it, torch or `apex.amp`: these differ for float16 on a CPU.
    """

    dtype: str
    under: Under
    operation: str
    ms: float | None


def _product(dtype: torch.dtype, device: torch.device) -> Call:
    size, _ = SIZES[device.type]
    a, b = (random((size, size), dtype, device, seed=seed) for seed in range(2))
    return lambda: a @ b


def _convolution(dtype: torch.dtype, device: torch.device, *, backward: bool) -> Call:
    _, images = SIZES[device.type]
    shapes = (images, 32, 32, 32), (64, 32, 3, 3)
    x, weight = (random(shape, dtype, device, seed=seed) for seed, shape in enumerate(shapes))
    if not backward:
        return lambda: conv2d(x, weight, padding=1)
    y = conv2d(x.requires_grad_(), weight.requires_grad_(), padding=1)
    grad = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, (x, weight), grad, retain_graph=True)


OPERATIONS: dict[str, Callable[[torch.dtype, torch.device], Call]] = {
    "matrix product": _product,
    "convolution forward": partial(_convolution, backward=False),
    "convolution backward": partial(_convolution, backward=True),
}


def speeds(device: torch.device) -> tuple[Speed, ...]:
    """Measure for a second or two; of devices other than a CPU and CUDA's, nothing.

    No other thread should compute float16 on a CPU meanwhile: amp's kernels are the process's.
    """
    if device.type not in SIZES:
        return ()
    plan = [
        (dtype, under, operation)
        for dtype, under in KINDS
        if under == "torch" or device.type == "cpu"
        for operation in OPERATIONS
    ]
    was_on = cpu_float16.is_on()
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            best = _best_times(plan, device)
    finally:
        cpu_float16.switch(on=was_on)
    return tuple(Speed(*what, best.get(what)) for what in plan)


def _best_times(plan: Iterable[_What], device: torch.device) -> dict[_What, float]:
    """The least time of each of ``plan`` that torch can do, all taking turns."""
    time_once = clock(device)
    calls: dict[_What, Call] = {}
    best: dict[_What, float] = {}
    for what in plan:
        dtype, under, operation = what
        _choose(under)
        try:
            calls[what] = OPERATIONS[operation](getattr(torch, dtype), device)
            best[what] = time_once(calls[what]).ms
        except RuntimeError:  # not made for this type, or out of memory
            calls.pop(what, None)
    again = [w for w in calls if w[0] == "float32" or best[w] <= TOO_SLOW_MS]

    def timed(what: _What) -> float:
        _choose(what[1])
        return time_once(calls[what]).ms

    taken = take_turns({what: partial(timed, what) for what in again}, TURNS, seconds=SECONDS)
    return best | {what: min(best[what], *times) for what, times in taken.items()}


def _choose(under: Under) -> None:
    """Have float16 on a CPU computed by amp's kernels, or by torch's."""
    if under == "amp":
        cpu_float16.begin(torch.float16, ["cpu"])
    else:
        cpu_float16.switch(on=False)


def times_of_float32(found: Iterable[Speed]) -> dict[tuple[str, Under], dict[str, float | None]]:
    """How many times float32's time each operation takes, by dtype and who computes it."""
    found = list(found)
    float32 = {speed.operation: speed.ms for speed in found if speed.dtype == "float32"}
    ratios: dict[tuple[str, Under], dict[str, float | None]] = {}
    for speed in found:
        base = float32[speed.operation]
        ratio = speed.ms / base if speed.ms and base else None
        ratios.setdefault((speed.dtype, speed.under), {})[speed.operation] = ratio
    return ratios
