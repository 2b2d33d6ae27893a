"""What ``apex bench kernels`` times: each case with the providers who compute it.

Optimizers come from `apex.bench.catalogue`; operations on lists of tensors are here. The first
provider is ours. The others are the fastest known ways to compute the same: torch's fused kernel,
torch's foreach functions, a plain loop over the tensors where neither exists, timm's optimizers
where torch has none. All get the same tensors; each optimizer keeps its own state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from apex.bench.catalogue.entry import Sizes
from apex.bench.catalogue.optimizers import OPTIMIZERS, Optimizer, TimedStep
from apex.bench.catalogue.peers import Peer
from apex.bench.catalogue.sizes import LISTS
from apex.bench.kernels.clocks import Call
from apex.ops.lists.scale import axpby_, scale_
from apex.ops.lists.tensor_norms import l2_norm

__all__ = ["DTYPES", "OF_LISTS", "Call", "Case", "Provider", "Shapes"]

Shapes = list[tuple[int, ...]]
Column = list[torch.Tensor]

DTYPES = {
    dtype: getattr(torch, dtype) for dtype in ("float32", "float16", "bfloat16")
}  # by the names of the options


@dataclass(frozen=True)
class Provider:
    """Somebody who computes a case."""

    name: str
    prepare: Callable[[Any], Call]
    """Makes of the input what is timed; ``ModuleNotFoundError`` says that a package is missing."""
    bytes_per_element: Callable[[torch.dtype], float] | None
    """What has to be read and written for an element, whatever caches save or waste; ``None`` where
    the memory does not decide."""
    only_on: str | None = None
    """The one type of device that it knows, if it does not know all."""


@dataclass(frozen=True)
class Case:
    """What is timed: ``make`` makes the input that every provider gets."""

    name: str
    make: Callable[[Shapes, torch.dtype, torch.device], Any]
    providers: tuple[Provider, ...]
    """Ours first."""
    shapes: Sizes = field(default_factory=lambda: LISTS)
    measure_memory: bool = False


def _random(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Column:
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


# --- optimizers -----------------------------------------------------------------------------------


def _parameters(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Column:
    params: Column = [torch.nn.Parameter(x) for x in _random(shapes, dtype, device)]
    for param, grad in zip(params, _random(shapes, dtype, device), strict=True):
        param.grad = grad
    return params


def _step_of(optimizer: Optimizer, timed: TimedStep) -> Case:
    def provider(name: str, make: Peer, float32_states: bool) -> Provider:
        def moved(dtype: torch.dtype) -> float:
            size = dtype.itemsize
            kept = 4 if float32_states else size
            # Gradient; weight and states twice.
            return 3 * size + 2 * timed.states * kept + timed.more_reads(size)

        return Provider(name, lambda params: make(params, **timed.numbers), moved)

    def ours(params: Column, **numbers: Any) -> Call:
        step: Call = optimizer.make(params, **numbers).step
        return step

    providers = [provider("apex", ours, timed.float32_states)]
    providers += [provider(name, make, False) for name, make in timed.peers.items()]
    return Case(optimizer.title.removeprefix("Fused").lower(), _parameters, tuple(providers))


# --- operations on lists of tensors ---------------------------------------------------------------


def _moving(columns: int, providers: Mapping[str, Callable[[Any], Call]]) -> tuple[Provider, ...]:
    """Providers who read or write as many columns."""
    return tuple(
        Provider(name, prepare, lambda dtype: columns * dtype.itemsize)
        for name, prepare in providers.items()
    )


def _flag(tensors: Column) -> torch.Tensor:
    return torch.zeros(1, device=tensors[0].device)


def _scale() -> Case:
    """Multiply in place and look for inf and nan, as after a backward pass."""

    def ours(tensors: Column) -> Call:
        flag = _flag(tensors)
        return lambda: scale_(tensors, tensors, 0.999, flag)

    def fused(tensors: Column) -> Call:
        flag, factor = _flag(tensors), torch.full((1,), 0.999, device=tensors[0].device)
        return lambda: torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, factor)

    def foreach(tensors: Column) -> Call:
        return lambda: torch._foreach_mul_(tensors, 0.999)

    who = {"apex": ours, "torch fused": fused, "torch foreach, no check": foreach}
    return Case("scale", _random, _moving(2, who))


def _axpby() -> Case:
    """``out = a * x + b * y``; ours looks for inf and nan too."""

    def make(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Column]:
        return [_random(shapes, dtype, device) for _ in range(3)]

    def ours(columns: list[Column]) -> Call:
        x, y, out = columns
        flag = _flag(x)
        return lambda: axpby_(x, y, out, 0.5, 2.0, flag)

    def foreach(columns: list[Column]) -> Call:
        x, y, out = columns

        def call() -> None:
            torch._foreach_copy_(out, y)
            torch._foreach_mul_(out, 2.0)
            torch._foreach_add_(out, x, alpha=0.5)

        return call

    def loop(columns: list[Column]) -> Call:
        def call() -> None:
            for x, y, out in zip(*columns, strict=True):
                torch.mul(y, 2.0, out=out).add_(x, alpha=0.5)

        return call

    who = {"apex": ours, "torch foreach, no check": foreach, "torch loop, no check": loop}
    return Case("axpby", make, _moving(3, who))


def _l2norm() -> Case:
    """The Euclidean norm of all elements together, as for clipping."""

    def of(norm: Callable[[Column], object]) -> Callable[[Column], Call]:
        return lambda tensors: lambda: norm(tensors)

    who = {
        "apex": of(l2_norm),
        "torch foreach": of(partial(get_total_norm, foreach=True)),
        "torch loop": of(partial(get_total_norm, foreach=False)),
    }
    return Case("l2norm", _random, _moving(1, who))


OF_LISTS: tuple[Case, ...] = (
    *(_step_of(one, one.timed) for one in OPTIMIZERS if one.timed),
    _scale(),
    _axpby(),
    _l2norm(),
)
