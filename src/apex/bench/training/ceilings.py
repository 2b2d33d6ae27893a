"""The most that this device does: matrix products and bytes copied per second, measured.

A training step is compared with these and not with a data sheet: a sheet names peaks that no
program reaches, and says nothing of the machine's other work, its cooling or its emulated dtypes.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from apex.amp.casting import cpu_float16
from apex.bench.kernels.cases import Call
from apex.bench.kernels.clocks import copy_gb_s, take_turns

__all__ = ["ceilings"]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SIZES = (256, 512, 1024, 2048, 4096, 8192)  # 8192: 0.8 GiB in float32, 1.4 ms at 800 TFLOP/s
LONG_ENOUGH_MS = 20.0
# As a linear layer has it in its forward, and in its backward. float16 on a CPU without arithmetic
# for it: 9 times as fast transposed.
PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a b'": lambda a, b: a @ b.t(),
    "a b": lambda a, b: a @ b,
}
SECONDS = 0.25  # for each dtype; the best of these times counts, as a disturbance only slows
COPIES = 3


def ceilings(device: torch.device) -> dict[str, float]:
    """Measure for about two seconds.

    Products are of square matrices, the second transposed or not, whichever is faster, at sizes
    that double until one product takes 20 ms; the fastest size counts. On a GPU ``flops fp32`` is
    without TF32. On a CPU ``flops fp16`` is what it is under amp.

    Returns:
        ``flops fp32``, ``flops fp16``, ``flops bf16``, on a GPU ``flops fp32 TF32``, and ``bytes``,
        read and written: each per second.
    """
    is_on = cpu_float16.is_on()
    with _fp32("ieee"):
        found = {f"flops {name}": _flops(dtype, device) for name, dtype in DTYPES.items()}
    if device.type == "cuda":
        with _fp32("tf32"):
            found["flops fp32 TF32"] = _flops(torch.float32, device)
    cpu_float16.switch(on=is_on)
    found["bytes"] = 1e9 * copy_gb_s(device, COPIES)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # GiB that this process would keep from those that train
    return found


@torch.no_grad()
def _flops(dtype: torch.dtype, device: torch.device) -> float:
    best, faster = 0.0, PRODUCTS
    cpu_float16.begin(dtype, [device.type])
    for size in SIZES:
        a, b = torch.randn(2, size, size, device=device).to(dtype)
        calls: dict[str, Call] = {name: partial(PRODUCTS[name], a, b) for name in faster}
        take_turns(calls, 1, device)  # the library chooses its kernel, and on a CPU starts threads
        times = {name: min(laps).ms for name, laps in take_turns(calls, 2, device).items()}
        name = min(times, key=times.__getitem__)
        ms, faster = times[name], {name: PRODUCTS[name]}
        if ms >= LONG_ENOUGH_MS or size == SIZES[-1]:
            end = time.perf_counter() + SECONDS
            while time.perf_counter() < end:
                ms = min(ms, take_turns({name: calls[name]}, 1, device)[name][0].ms)
        best = max(best, 2 * size**3 / (ms / 1000))
        if ms >= LONG_ENOUGH_MS:
            break
    return best


@contextlib.contextmanager
def _fp32(precision: str) -> Iterator[None]:
    """Choose how a GPU multiplies float32 matrices."""
    place: Any = torch.backends.cuda.matmul
    before = place.fp32_precision
    place.fp32_precision = precision
    try:
        yield
    finally:
        place.fp32_precision = before
