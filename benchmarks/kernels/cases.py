"""What ``python -m benchmarks.kernels`` times: each case with the providers who compute it.

Optimizers and ops come from `apex.catalogue`; operations on lists of tensors are here. The
first provider is ours. The others are the fastest known ways to compute the same: torch's fused
kernel, its foreach functions, torch.compile, Liger-Kernel. All get the same tensors; each optimizer
keeps its own state.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config

from apex._compat import private
from apex.catalogue.entry import LISTS, Function, Inputs, Op, Sizes, Timed
from apex.catalogue.ops import OPS
from apex.catalogue.optimizers import OPTIMIZERS, Optimizer, TimedStep
from apex.catalogue.peers import Peer
from apex.commands.info.clocks import Call
from apex.ops.lists.scale import axpby_, scale_
from apex.ops.lists.tensor_norms import l2_norm

__all__ = ["COMPILE", "DTYPES", "OF_LAYERS", "OF_LISTS", "Call", "TimedCase", "Provider", "Shapes"]

Shapes = list[tuple[int, ...]]
Tensors = list[torch.Tensor]

DTYPES = {
    dtype: getattr(torch, dtype) for dtype in ("float32", "float16", "bfloat16")
}  # by the names of the options
COMPILE: dict[str, Any] = {"dynamic": False}


@dataclass(frozen=True)
class Provider:
    """Somebody who computes a case.

    Attributes:
        name: For people.
        prepare: Makes of the input what is timed; ``ModuleNotFoundError`` says that a package is
            missing.
        bytes_per_element: What has to be read and written for an element, whatever caches save or
            waste, by dtype; ``None`` where the memory does not decide.
        only_on: The one type of device that it knows, if it does not know all.
    """

    name: str
    prepare: Callable[[Any], Call]
    bytes_per_element: Callable[[torch.dtype], float] | None
    only_on: str | None = None


@dataclass(frozen=True)
class TimedCase:
    """What is timed: ``make`` makes the input that every provider gets; ours is the first."""

    name: str
    make: Callable[[Shapes, torch.dtype, torch.device], Any]
    providers: tuple[Provider, ...]
    shapes: Sizes
    measure_memory: bool = False


def _numbers(count: float) -> Callable[[torch.dtype], float]:
    """The bytes of so many numbers of a dtype."""
    return lambda dtype: count * dtype.itemsize


# --- optimizers -----------------------------------------------------------------------------------


def _parameters(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Tensors:
    *_, weights, grads = _lists(2, shapes, dtype, device)
    params: Tensors = [torch.nn.Parameter(weight) for weight in weights]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def _step_of(optimizer: Optimizer, timed: TimedStep) -> TimedCase:
    def provider(name: str, make: Peer, float32_states: bool) -> Provider:
        def moved(dtype: torch.dtype) -> float:
            size = dtype.itemsize
            kept = 4 if float32_states else size
            # Gradient; weight and states twice.
            return 3 * size + 2 * timed.states * kept + timed.more_reads(size)

        return Provider(name, lambda params: make(params, **timed.numbers), moved)

    def ours(params: Tensors, **numbers: Any) -> Call:
        step: Call = optimizer.make(params, **numbers).step
        return step

    providers = [provider("apex", ours, timed.float32_states)]
    providers += [provider(name, make, False) for name, make in timed.peers.items()]
    name = optimizer.title.removeprefix("Fused").lower()
    return TimedCase(name, _parameters, tuple(providers), LISTS)


# --- operations on lists of tensors ---------------------------------------------------------------


def _lists(count: int, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """A flag, a factor, and so many lists of random numbers."""
    wide: Any = {"device": device, "dtype": torch.float32}
    flag, factor = torch.zeros(1, **wide), torch.full((1,), 0.999, **wide)
    lists = [[torch.randn(shape, **wide).to(dtype) for shape in shapes] for _ in range(count)]
    return [flag, factor, *lists]


def _foreach_axpby(
    flag: torch.Tensor, _: torch.Tensor, x: Tensors, y: Tensors, out: Tensors
) -> None:
    private.foreach_copy_(out, y)
    private.foreach_mul_(out, 2.0)
    private.foreach_add_(out, x, alpha=0.5)


def _on_lists(
    name: str, lists: int, moved: int, providers: dict[str, Callable[..., Any]]
) -> TimedCase:
    """``lists`` are read or written, ``moved`` numbers for an element."""

    def provider(who: str, do: Callable[..., Any]) -> Provider:
        return Provider(who, lambda inputs: partial(do, *inputs), _numbers(moved))

    made = tuple(provider(who, do) for who, do in providers.items())
    return TimedCase(name, partial(_lists, lists), made, LISTS)


OF_LISTS: tuple[TimedCase, ...] = (
    *(_step_of(one, one.timed) for one in OPTIMIZERS if one.timed),
    # Multiplied in place, and looked through for inf and nan, as after a backward pass.
    _on_lists("scale", 1, 2, {
        "apex": lambda flag, _, x: scale_(x, x, 0.999, flag),
        "torch fused": lambda flag, factor, x: (
            private.amp_foreach_non_finite_check_and_unscale_(x, flag, factor)
        ),
        "torch foreach, no check": lambda flag, _, x: private.foreach_mul_(x, 0.999),
    }),
    # ``out = a * x + b * y``; ours looks for inf and nan too.
    _on_lists("axpby", 3, 3, {
        "apex": lambda flag, _, x, y, out: axpby_(x, y, out, 0.5, 2.0, flag),
        "torch foreach, no check": _foreach_axpby,
    }),
    # The Euclidean norm of all elements together, as for clipping.
    _on_lists("l2norm", 1, 1, {
        "apex": lambda flag, _, x: l2_norm(x),
        "torch foreach": lambda flag, _, x: torch.nn.utils.get_total_norm(x, foreach=True),
    }),
)  # fmt: skip


# --- ops: forward, as in training with what backward needs; backward; both -----------------------


def _call(mode: str, function: Function, inputs: Inputs) -> Call:
    # A copy for each: Liger-Kernel writes the gradient over the logits.
    leaves = [leaf.clone().requires_grad_() for leaf in inputs.leaves]

    def forward() -> torch.Tensor:
        return function(*leaves, *inputs.rest)

    if mode == "forward":
        return forward
    y = forward()
    grad, backward = torch.ones_like(y), partial(torch.autograd.grad, allow_unused=True)
    if mode == "backward":
        return lambda: backward(y, leaves, grad, retain_graph=True)
    return lambda: backward(forward(), leaves, grad)


def _compiled(function: Function) -> Function:
    torch.compiler.reset()  # else torch gives up compiling at the ninth shape or dtype
    compiled = torch.compile(function, **COMPILE)

    def call(*inputs: Any) -> torch.Tensor:
        # Donated buffers would refuse a second backward pass over the same graph.
        with functorch_config.patch(donated_buffer=False):
            return compiled(*inputs)

    return call


def _ligers(function: Function) -> Function:
    return partial(function, importlib.import_module("liger_kernel.transformers.functional"))


def _functions(op: Op, timed: Timed) -> Iterator[tuple[str, Callable[[], Function], str | None]]:
    """Name, what makes the function when it is timed, and the one type of device that it knows."""
    yield "apex", lambda: op.ours, None
    yield "torch", lambda: op.theirs, None
    if written_out := timed.written_out:
        yield "torch, written out", lambda: written_out, None
    yield "torch.compile", lambda: _compiled(op.theirs), None
    if liger := timed.liger:
        yield "Liger-Kernel", lambda: _ligers(liger), "cuda"


def _modes(op: Op, timed: Timed) -> Iterator[TimedCase]:
    def make(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
        return op.inputs(shapes[0], dtype, device)

    def prepare(mode: str, get: Callable[[], Function], inputs: Inputs) -> Call:
        return _call(mode, get(), inputs)

    forward, backward = timed.columns or (0, 0)
    for mode, count in ("forward", forward), ("backward", backward), ("both", forward + backward):
        moved = _numbers(count) if timed.columns else None
        providers = tuple(
            Provider(name, partial(prepare, mode, get), moved, only_on)
            for name, get, only_on in _functions(op, timed)
        )
        yield TimedCase(f"{op.name}_{mode}", make, providers, timed.sizes, mode == "both")


OF_LAYERS: tuple[TimedCase, ...] = tuple(
    case for op in OPS if op.timed for case in _modes(op, op.timed)
)
