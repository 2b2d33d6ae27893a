"""What checks share: their table, comparisons, small networks, captures.

A check is a function. It raises where something is wrong, and what it returns is shown.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from apex.commands.info.clocks import on_gpu
from apex.commands.selftest.gpu import waits_refused
from tools.gpu import stand_ins

Tensor = torch.Tensor
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# What is computed in float32 and rounded once is off by one rounding in 16 bits. In float32 sums
# round at every addition; those of rows and of lists stay below 8 (tests/tolerance.py).
ROUNDINGS = {F64: 8, F32: 8, F16: 2, BF16: 2}
TIMES_TORCHS = 2
CALLS = 10  # that a time is the average of
PAUSE = 60_000_000  # cycles, 30 ms: ten forwards and backwards take the host 5 to 12 ms on an H200
WARM_UP = 4  # steps until the casts, the state and the tables of addresses are there

CHECKS: dict[str, Callable[[], Any]] = {}


def gpu_ms(work: Callable[[], Any]) -> float:
    """Of a call, queued behind a pause of the GPU, so that it never waits for the host."""
    return on_gpu(work, CALLS, lambda: torch.cuda._sleep(PAUSE)).ms


def wall_ms(work: Callable[[], Any]) -> float:
    """Of a call, on the clock, until the GPU has done all of them."""
    return on_gpu(work, CALLS).wall_ms


class NotDry(Exception):
    """Raised in a dry run by a check that nothing can stand in for."""


DRY = False  # `choose_device` sets both, before the checks are imported
DEVICE = torch.device("cuda", 0)


def check(*cases: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function, or one check for each of its cases (what it is called with)."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for case in cases or ((),):
            given = case if isinstance(case, tuple) else (case,)
            words = ", ".join(getattr(x, "__name__", str(x)).removeprefix("torch.") for x in given)
            name = function.__name__ + (f"[{words}]" if given else "")
            assert name not in CHECKS, f"two checks are called {name}"
            CHECKS[name] = partial(function, *given)
        return function

    return register


def choose_device(dry: bool) -> None:
    """Let this process use the GPU, or a CPU with stand-ins."""
    if dry:
        globals().update(DRY=True, DEVICE=torch.device("cpu"))
        stand_ins.install()
        torch.set_num_threads(1)


def need(condition: bool, text: str) -> None:
    """Raise with a text where a condition does not hold."""
    if not condition:
        raise AssertionError(text)


def same(first: Iterable[Tensor], second: Iterable[Tensor], what: str) -> None:
    """Compare bit by bit; nan equals nan."""
    for number, (x, y) in enumerate(zip(first, second, strict=True)):
        alike = x.dtype == y.dtype and x.shape == y.shape
        if not (alike and bool(((x == y) | (x.isnan() & y.isnan())).all())):
            largest = (x.double() - y.double()).abs().max().item() if x.shape == y.shape else None
            raise AssertionError(f"{what}: tensor {number} differs by {largest}")


def off(actual: Tensor, exact: Tensor) -> float:
    """The error of a result as rms, over the rms of the exact one."""
    actual, exact = (x.detach().double().cpu() for x in (actual, exact))
    if not actual.numel():
        return 0.0
    error = (actual - exact).square().mean().sqrt() / (exact.square().mean().sqrt() + 1e-30)
    return error.item()


def no_farther(actual: Tensor, exact: Tensor, torchs: Tensor | None = None, what: str = "") -> None:
    """Allow some roundings of the dtype, or twice torch's error on this device in this dtype."""
    dtype = actual.dtype
    rounding = max(torch.finfo(dtype).eps / 4, off(exact.to(dtype), exact))
    allowed = ROUNDINGS[dtype] * rounding
    if torchs is not None:
        need(torchs.dtype == dtype, f"{what}: torch's is {torchs.dtype}, ours is {dtype}")
        allowed = max(allowed, TIMES_TORCHS * off(torchs, exact))
    error = off(actual, exact)
    need(error <= allowed, f"{what} off by {error:.3g}, allowed {allowed:.3g}")


def close(actual: Tensor, exact: Tensor, allowed: float, what: str = "") -> None:
    """Allow an error that is given, of trainings that take two ways."""
    error = off(actual, exact)
    need(error <= allowed, f"{what} off by {error:.3g}")


def without_waits(work: Callable[[], object]) -> None:
    """Warm up, then do it twice where a wait raises."""
    for _ in range(WARM_UP):
        work()
    torch.cuda.synchronize()
    with waits_refused():
        work()
        work()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32, device: Any = None) -> Tensor:
    """Draw on the CPU, so that every device has the same numbers."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, device="cpu", dtype=F32)
    return drawn.to(DEVICE if device is None else device, dtype)


def network(device: Any = None, norm: bool = True) -> nn.Sequential:
    """A small network whose weights are drawn on the CPU in float32, whatever the defaults are."""
    torch.manual_seed(0)
    made_on: Any = {"device": "cpu", "dtype": F32}
    layers: list[nn.Module] = [nn.Linear(16, 64, **made_on)]
    layers += [nn.BatchNorm1d(64, **made_on)] if norm else []
    layers += [nn.ReLU(), nn.Linear(64, 64, **made_on), nn.GELU(), nn.Linear(64, 4, **made_on)]
    return nn.Sequential(*layers).to(DEVICE if device is None else device)


def gradients(model: nn.Module) -> list[Any]:
    """Of its parameters, each of which has one."""
    return [param.grad for param in model.parameters()]


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Clones that later steps do not change."""
    return [tensor.detach().clone() for tensor in tensors]


@contextlib.contextmanager
def default(which: Any) -> Iterator[None]:
    """Set a default dtype, the default device, or the default tensor type, which sets both."""
    if isinstance(which, torch.dtype):
        torch.set_default_dtype(which)
    elif which == "device":
        torch.set_default_device(DEVICE)
    elif which == "type":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates it, and programs of 2018 call it
            torch.set_default_tensor_type("torch.FloatTensor" if DRY else "torch.cuda.FloatTensor")
    try:
        yield
    finally:
        torch.set_default_device(None)
        if which == "type":
            torch.set_default_tensor_type(torch.FloatTensor)
        torch.set_default_dtype(F32)


class Captured:
    """Work in a CUDA graph."""

    def __init__(self, work: Callable[[], Tensor | None], **options: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, **options):
            self.out: Any = work()

    def replay(self) -> None:
        """Replay, and wait."""
        self.graph.replay()
        torch.cuda.synchronize()


def on_a_side_stream(work: Callable[[], object], times: int = 3) -> Any:
    """Warm up where a capture will be, and return that stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            work()
    torch.cuda.current_stream().wait_stream(side)
    return side


def one_rank(**options: Any) -> Any:
    """Begin a process group of one rank, over NCCL, or gloo in a dry run."""
    dist = torch.distributed
    if not DRY:
        torch.cuda.set_device(0)
        options = {"backend": "nccl", **options}
    else:
        options = {"backend": "gloo"}
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(rank=0, world_size=1, store=store, **options)
    return dist
