"""How ``apex bench kernels`` times the ops of the catalogue: forward, backward and both.

Forward is as in training: with what backward needs. Providers beside ours: torch's functions, the
expression that people write out where there is one, torch.compile of torch's functions, and
Liger-Kernel on a GPU.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from apex.bench.catalogue.entry import Function, Inputs, Op, Timed
from apex.bench.catalogue.ops import OPS
from apex.bench.kernels.cases import Call, Case, Provider, Shapes

__all__ = ["COMPILE", "OF_LAYERS"]

COMPILE: dict[str, Any] = {"dynamic": False}


def _forward(function: Function, inputs: Inputs) -> Call:
    return lambda: function(*inputs.leaves, *inputs.rest)


def _backward(function: Function, inputs: Inputs) -> Call:
    y = function(*inputs.leaves, *inputs.rest)
    grad = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, inputs.leaves, grad, retain_graph=True, allow_unused=True)


def _both(function: Function, inputs: Inputs) -> Call:
    def forward() -> torch.Tensor:
        return function(*inputs.leaves, *inputs.rest)

    grad = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), inputs.leaves, grad, allow_unused=True)


MODES = {"forward": _forward, "backward": _backward, "both": _both}


def _compiled(function: Function) -> Function:
    torch._dynamo.reset()  # else torch gives up compiling at the ninth shape or dtype
    compiled = torch.compile(function, **COMPILE)

    def call(*inputs: Any) -> torch.Tensor:
        # Donated buffers would refuse a second backward pass over the same graph.
        with torch._functorch.config.patch(donated_buffer=False):
            return compiled(*inputs)

    return call


def _ligers(function: Function) -> Function:
    functions = importlib.import_module("liger_kernel.transformers.functional")
    return lambda *inputs: function(functions, *inputs)


def _providers(op: Op, timed: Timed) -> Iterator[tuple[str, Callable[[], Function], str | None]]:
    """Name, what makes the function when it is timed, and the one type of device that it knows."""
    yield "apex", lambda: op.ours, None
    yield "torch", lambda: op.theirs, None
    if written_out := timed.written_out:
        yield "torch, written out", lambda: written_out, None
    yield "torch.compile", lambda: _compiled(op.theirs), None
    if liger := timed.liger:
        yield "Liger-Kernel", lambda: _ligers(liger), "cuda"


def _each_mode(op: Op, timed: Timed) -> Iterator[Case]:
    def make(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
        return op.inputs(shapes[0], dtype, device)

    for mode in MODES:
        providers = tuple(
            Provider(name, _prepare(mode, get), _moved(mode, timed.columns), only_on)
            for name, get, only_on in _providers(op, timed)
        )
        yield Case(f"{op.name}_{mode}", make, providers, timed.sizes, mode == "both")


def _prepare(mode: str, get: Callable[[], Function]) -> Callable[[Inputs], Call]:
    def prepare(inputs: Inputs) -> Call:
        # A copy for each: Liger-Kernel writes the gradient over the logits.
        own = [leaf.clone().requires_grad_() for leaf in inputs.leaves]
        return MODES[mode](get(), Inputs(own, inputs.rest))

    return prepare


def _moved(mode: str, columns: tuple[float, float] | None) -> Callable[[torch.dtype], float] | None:
    if columns is None:
        return None
    count = {"forward": columns[0], "backward": columns[1], "both": sum(columns)}[mode]
    return lambda dtype: count * dtype.itemsize


OF_LAYERS: tuple[Case, ...] = tuple(
    case for op in OPS if op.timed for case in _each_mode(op, op.timed)
)
