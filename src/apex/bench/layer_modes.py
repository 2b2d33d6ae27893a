"""How ``apex bench kernels`` times a function of tensors: forward, backward and both.

Forward is as in training: with what backward needs. The functions are in `layer_cases` and
`transformer_cases`.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from apex.bench.kernel_cases import Call, Op, Provider, Shapes

__all__ = [
    "COMPILE", "IMAGES", "MATRICES", "Inputs", "compiled", "each_mode", "given", "liger",
]  # fmt: skip

Inputs = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]
Make = Callable[[Shapes, torch.dtype, torch.device], Inputs]

COMPILE: dict[str, Any] = {"dynamic": False}

# --- shapes ---------------------------------------------------------------------------------------

MATRICES: dict[str, Callable[[bool], Shapes]] = {
    "small": lambda full: [(2048, 1024)],
    "middle": lambda full: [(4096, 4096)],
    "wide": lambda full: [(2048 if full else 256, 32768)],
}
IMAGES: dict[str, Callable[[bool], Shapes]] = {  # as many elements as the matrices of the name
    "small": lambda full: [(2, 64, 128, 128)],
    "middle": lambda full: [(4, 256, 128, 128)],
    "wide": lambda full: [(16 if full else 2, 256, 128, 128)],
}


# --- modes ----------------------------------------------------------------------------------------


def _forward(function: Function, inputs: Inputs) -> Call:
    return lambda: function(*inputs)


def _backward(function: Function, inputs: Inputs) -> Call:
    y, wanted, grad = _traced(function, inputs)
    return lambda: torch.autograd.grad(y, wanted, grad, retain_graph=True, allow_unused=True)


def _both(function: Function, inputs: Inputs) -> Call:
    _, wanted, grad = _traced(function, inputs)
    return lambda: torch.autograd.grad(function(*inputs), wanted, grad, allow_unused=True)


def _traced(
    function: Function, inputs: Inputs
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The result of a first call, what has a gradient, and the gradient to start from."""
    y = function(*inputs)
    return y, [x for x in inputs if x.requires_grad], torch.ones_like(y)


MODES = {"forward": _forward, "backward": _backward, "both": _both}


# --- providers ------------------------------------------------------------------------------------


class Who(NamedTuple):
    name: str
    get: Callable[[], Function]
    only_on: str | None = None


def given(name: str, function: Function) -> Who:
    """Somebody who needs nothing to be prepared."""
    return Who(name, lambda: function)


def compiled(function: Function) -> Who:
    """torch.compile of a function."""

    def get() -> Function:
        torch._dynamo.reset()  # else torch gives up compiling at the ninth shape or dtype
        compiled = torch.compile(function, **COMPILE)

        def call(*inputs: torch.Tensor) -> torch.Tensor:
            # Donated buffers would refuse a second backward pass over the same graph.
            with torch._functorch.config.patch(donated_buffer=False):
                return compiled(*inputs)

        return call

    return Who("torch.compile", get)


def liger(call: Callable[[Any, Inputs], torch.Tensor]) -> Who:
    """Liger-Kernel; ``call`` gets its functions and the inputs."""

    def get() -> Function:
        functions = importlib.import_module("liger_kernel.transformers.functional")
        return lambda *inputs: call(functions, inputs)

    return Who("Liger-Kernel", get, only_on="cuda")


def each_mode(
    name: str,
    make: Make,
    who: tuple[Who, ...],
    *,
    columns: tuple[float, float] | None,
    shapes: dict[str, Callable[[bool], Shapes]] = MATRICES,
) -> Iterator[Op]:
    """One operation for each mode.

    Args:
        name: Of the operation, before that of the mode.
        make: Makes the inputs.
        who: Who computes it, ours first.
        columns: Numbers read or written for an element, forward and backward; ``None`` where
            products of matrices and not the memory decide.
        shapes: The sets of shapes.
    """
    for mode in MODES:
        providers = tuple(
            Provider(one.name, _prepare(mode, one.get), _moved(mode, columns), one.only_on)
            for one in who
        )
        yield Op(f"{name}_{mode}", make, providers, shapes, measure_memory=mode == "both")


def _prepare(mode: str, get: Callable[[], Function]) -> Callable[[Inputs], Call]:
    def prepare(inputs: Inputs) -> Call:
        # A copy for each: Liger-Kernel writes the gradient over the logits.
        own = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in inputs)
        return MODES[mode](get(), own)

    return prepare


def _moved(mode: str, columns: tuple[float, float] | None) -> Callable[[torch.dtype], float] | None:
    if columns is None:
        return None
    count = {"forward": columns[0], "backward": columns[1], "both": sum(columns)}[mode]
    return lambda dtype: count * dtype.itemsize
