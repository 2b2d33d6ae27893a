"""What ``apex bench kernels`` times on lists of tensors: operations, providers and inputs.

To add an operation, add an `Op` to ``OPS``: its name, its input, and its providers. The first
provider is ours. The others are the fastest known ways to compute the same: torch's fused
kernel, torch's foreach functions, torch's plain loop over the tensors where neither exists, timm's
optimizers where torch has none. All providers of an operation get the same tensors; each optimizer
keeps its own state. Layers and losses are in `layer_cases`, in the same form.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from apex import optimizers
from apex.ops.lists.scale import axpby_, scale_
from apex.ops.lists.tensor_norms import l2_norm

__all__ = ["DTYPES", "LISTS", "OPS", "Call", "Op", "Provider", "Shapes"]

Shapes = list[tuple[int, ...]]
Call = Callable[[], object]
Column = list[torch.Tensor]

DTYPES = {
    dtype: getattr(torch, dtype) for dtype in ("float32", "float16", "bfloat16")
}  # by the names of the options


# --- the form -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provider:
    """Somebody who computes an operation.

    Attributes:
        name: For people.
        prepare: Makes of the input what is timed. ``ModuleNotFoundError`` says that a package is
            not installed; any other error is shown in the provider's row.
        bytes_per_element: What has to be read and written for an element of a dtype, the
            dimensions' product being the number of elements; not what caches save or waste.
            ``None`` where the memory does not decide.
        only_on: The one type of device that it knows, ``None`` if it knows all.
    """

    name: str
    prepare: Callable[[Any], Call]
    bytes_per_element: Callable[[torch.dtype], float] | None
    only_on: str | None = None


@dataclass(frozen=True)
class Op:
    """An operation to time.

    Attributes:
        name: What users choose it by.
        make: Makes the input of shapes, dtype and device; every provider gets the same.
        providers: Ours first.
        shapes: The sets of shapes by name. Each is asked whether the full size is wanted, which a
            GPU needs to be busy and which takes too long on a CPU.
        measure_memory: Whether the memory of a call is of interest.
    """

    name: str
    make: Callable[[Shapes, torch.dtype, torch.device], Any]
    providers: tuple[Provider, ...]
    shapes: Mapping[str, Callable[[bool], Shapes]] = field(default_factory=lambda: LISTS)
    measure_memory: bool = False


# --- lists of tensors -----------------------------------------------------------------------------


def _one(full: bool) -> Shapes:
    return [(100_000_000 if full else 10_000_000,)]


def _transformer(full: bool) -> Shapes:
    """Shapes of a decoder with 24 layers, 184 wide, and 1,000 tokens: 293 tensors, 10.3 million."""
    width, layers, tokens = 184, 24, 1000
    linear = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    layer = [shape for out, inner in linear for shape in ((out, inner), (out,))]
    layer += [(width,)] * 4  # two norms
    ends = [(tokens, width), (width, 256), (width,), (width,), (tokens, width)]
    return [*layer * layers, *ends]


def _tiny(full: bool) -> Shapes:
    """1,000 tensors of 1 to 100 elements: what counts is the cost of a tensor."""
    return [(1 + number % 100,) for number in range(1000)]


LISTS: dict[str, Callable[[bool], Shapes]] = {
    "one": _one,
    "transformer": _transformer,
    "tiny": _tiny,
}


def _random(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Column:
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


# --- optimizers -----------------------------------------------------------------------------------


def _parameters(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Column:
    params: Column = [torch.nn.Parameter(x) for x in _random(shapes, dtype, device)]
    for param, grad in zip(params, _random(shapes, dtype, device), strict=True):
        param.grad = grad
    return params


def _stepping(
    name: str,
    make: Callable[[Column], torch.optim.Optimizer],
    *,
    states: int,
    fp32_states: bool,
    more_reads: Callable[[int], float] = lambda size: 0,
) -> Provider:
    """An optimizer as a provider.

    Args:
        name: For people.
        make: Makes it.
        states: How many numbers it keeps for each weight.
        fp32_states: Whether these are float32 whatever the weight's dtype is.
        more_reads: Bytes of further passes, from the bytes of a weight.
    """

    def moved(dtype: torch.dtype) -> float:
        size = dtype.itemsize
        kept = 4 if fp32_states else size
        return 3 * size + 2 * states * kept + more_reads(size)  # gradient; weight and states twice

    return Provider(name, lambda params: make(params).step, moved)


# Peers of an optimizer that torch has, with the options that choose them.
TORCH: dict[str, dict[str, Any]] = {
    "torch fused": {"fused": True},
    "torch foreach": {"foreach": True},
}


def _beside_torch(
    name: str, ours: str, theirs: str, *, states: int, fp32_states: bool, **numbers: Any
) -> Op:
    """An optimizer that torch has too, both with the same options."""

    def provided(provider: str, implementation: dict[str, Any]) -> Provider:
        def make(params: Column) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = getattr(torch.optim, theirs)(
                params, **numbers, **implementation
            )
            return made

        return _stepping(provider, make, states=states, fp32_states=False)

    peers = [provided(provider, chosen) for provider, chosen in TORCH.items()]
    return Op(
        name,
        _parameters,
        (_ours(ours, states=states, fp32_states=fp32_states, **numbers), *peers),
    )


def _ours(
    name: str,
    *,
    states: int,
    fp32_states: bool,
    more_reads: Callable[[int], float] = lambda size: 0,
    **numbers: Any,
) -> Provider:
    def make(params: Column) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(optimizers, name)(params, **numbers)
        return made

    return _stepping("apex", make, states=states, fp32_states=fp32_states, more_reads=more_reads)


def _lamb() -> Op:
    # Besides Adam's pass: the gradients once for their norm, then weight and update for the step.
    def more(size: int) -> float:
        return size + (2 * size + 4)

    def theirs(name: str, foreach: bool) -> Provider:
        return _stepping(
            name,
            lambda params: _timms_lamb(params, foreach),
            states=2,
            fp32_states=False,
            more_reads=more,
        )

    ours = _ours("FusedLAMB", states=2, fp32_states=False, more_reads=more, weight_decay=0.01)
    return Op("lamb", _parameters, (ours, theirs("timm foreach", True), theirs("timm loop", False)))


def _novograd() -> Op:
    numbers: dict[str, Any] = {"betas": (0.95, 0.98), "weight_decay": 0.01}

    def the_norm_s_read(size: int) -> float:
        return size

    theirs = _stepping(
        "timm loop",
        lambda params: _timm("nvnovograd").NvNovoGrad(params, **numbers),
        states=1,
        fp32_states=False,
        more_reads=the_norm_s_read,
    )
    ours = _ours(
        "FusedNovoGrad", states=1, fp32_states=False, more_reads=the_norm_s_read, **numbers
    )
    return Op("novograd", _parameters, (ours, theirs))


def _timms_lamb(params: list[torch.Tensor], foreach: bool) -> Any:
    lamb = _timm("lamb").Lamb
    if "foreach" in inspect.signature(lamb).parameters:
        return lamb(params, weight_decay=0.01, foreach=foreach)
    if foreach:
        raise ModuleNotFoundError("this timm has no LAMB by foreach functions", name="timm")
    return lamb(params, weight_decay=0.01)


@functools.cache
def _timm(module: str) -> Any:
    """Import a module of ``timm.optim`` alone.

    ``import timm`` wants torchvision and a client of a model hub; the optimizers need neither.
    """
    found = importlib.util.find_spec("timm")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'timm'", name="timm")
    package = types.ModuleType("_timm_optim")
    package.__path__ = [os.path.join(path, "optim") for path in found.submodule_search_locations]
    sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"{package.__name__}.{module}")


# --- multi-tensor operations ----------------------------------------------------------------------


def _moving(columns: int) -> Callable[[torch.dtype], float]:
    """Bytes for an element of as many columns."""
    return lambda dtype: columns * dtype.itemsize


def _flag(tensors: Column) -> torch.Tensor:
    return torch.zeros(1, device=tensors[0].device)


def _scale() -> Op:
    """Multiply in place and look for inf and nan, as after a backward pass."""

    def ours(tensors: Column) -> Call:
        flag = _flag(tensors)
        return lambda: scale_(tensors, tensors, 0.999, flag)

    def fused(tensors: Column) -> Call:
        flag, factor = _flag(tensors), torch.full((1,), 0.999, device=tensors[0].device)
        return lambda: torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, factor)

    def foreach(tensors: Column) -> Call:
        return lambda: torch._foreach_mul_(tensors, 0.999)

    return Op(
        "scale",
        _random,
        (
            Provider("apex", ours, _moving(2)),
            Provider("torch fused", fused, _moving(2)),
            Provider("torch foreach, no check", foreach, _moving(2)),
        ),
    )


def _axpby() -> Op:
    """``out = a * x + b * y``; ours looks for inf and nan too."""

    def make(
        shapes: Shapes, dtype: torch.dtype, device: torch.device
    ) -> tuple[Column, Column, Column]:
        x, y, out = (_random(shapes, dtype, device) for _ in range(3))
        return x, y, out

    def ours(columns: tuple[Column, Column, Column]) -> Call:
        x, y, out = columns
        flag = _flag(x)
        return lambda: axpby_(x, y, out, 0.5, 2.0, flag)

    def foreach(columns: tuple[Column, Column, Column]) -> Call:
        x, y, out = columns

        def call() -> None:
            torch._foreach_copy_(out, y)
            torch._foreach_mul_(out, 2.0)
            torch._foreach_add_(out, x, alpha=0.5)

        return call

    def loop(columns: tuple[Column, Column, Column]) -> Call:
        def call() -> None:
            for x, y, out in zip(*columns, strict=True):
                torch.mul(y, 2.0, out=out).add_(x, alpha=0.5)

        return call

    return Op(
        "axpby",
        make,
        (
            Provider("apex", ours, _moving(3)),
            Provider("torch foreach, no check", foreach, _moving(3)),
            Provider("torch loop, no check", loop, _moving(3)),
        ),
    )


def _l2norm() -> Op:
    """The Euclidean norm of all elements together, as for clipping."""

    def theirs(foreach: bool) -> Callable[[Column], Call]:
        return lambda tensors: lambda: get_total_norm(tensors, foreach=foreach)

    return Op(
        "l2norm",
        _random,
        (
            Provider("apex", lambda tensors: lambda: l2_norm(tensors), _moving(1)),
            Provider("torch foreach", theirs(True), _moving(1)),
            Provider("torch loop", theirs(False), _moving(1)),
        ),
    )


OPS: tuple[Op, ...] = (
    _beside_torch("adam", "FusedAdam", "AdamW", states=2, fp32_states=True, weight_decay=0.01),
    _beside_torch(
        "sgd",
        "FusedSGD",
        "SGD",
        states=1,
        fp32_states=False,
        lr=1e-3,
        momentum=0.9,
        weight_decay=1e-4,
    ),
    _beside_torch("adagrad", "FusedAdagrad", "Adagrad", states=1, fp32_states=False, lr=1e-2),
    _lamb(),
    _novograd(),
    _scale(),
    _axpby(),
    _l2norm(),
)
