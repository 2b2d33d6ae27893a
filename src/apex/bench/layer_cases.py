"""What ``apex bench kernels`` times of layers and losses: norms, cross-entropy, group norm.

Each is timed forward, backward and both, as operations of their own. Forward is as in training:
with what backward needs. Providers beside ours: torch's function, the expression that people write
out where there is one, torch.compile of torch's function, and Liger-Kernel on a GPU.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from apex.bench.kernel_cases import Call, Op, Provider, Shapes
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.ops.group_norm import group_norm
from apex.ops.row_norms import layer_norm, rms_norm

__all__ = ["IMAGES", "LAYERS", "MATRICES"]

Inputs = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]
Make = Callable[[Shapes, torch.dtype, torch.device], Inputs]

EPS = 1e-5
FEATURES = 256  # of the linear layer before the cross-entropy
GROUPS = 32
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


# --- inputs ---------------------------------------------------------------------------------------


def _rows(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Rows, and the weight and bias of a norm."""
    [shape] = shapes
    columns = shape[1]
    return (
        torch.randn(shape, device=device).to(dtype),
        torch.ones(columns, dtype=dtype, device=device),
        torch.zeros(columns, dtype=dtype, device=device),
    )


def _logits(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
    [(rows, classes)] = shapes
    logits = torch.randn(rows, classes, device=device).to(dtype)
    return logits, torch.randint(classes, (rows,), device=device)


def _before_logits(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
    [(rows, classes)] = shapes
    return (
        torch.randn(rows, FEATURES, device=device).to(dtype),
        torch.randn(classes, FEATURES, device=device).mul(FEATURES**-0.5).to(dtype),
        torch.randint(classes, (rows,), device=device),
    )


def _images(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Channels-last images, and the weight and bias of a group norm."""
    [shape] = shapes
    images = torch.randn(shape, device=device).to(dtype)
    weight = torch.ones(shape[1], dtype=dtype, device=device)
    return images.to(memory_format=torch.channels_last), weight, torch.zeros_like(weight)


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


class _Who(NamedTuple):
    name: str
    get: Callable[[], Function]
    only_on: str | None = None


def _given(name: str, function: Function) -> _Who:
    return _Who(name, lambda: function)


def _compiled(function: Function) -> _Who:
    def get() -> Function:
        torch._dynamo.reset()  # else torch gives up compiling at the ninth shape or dtype
        compiled = torch.compile(function, **COMPILE)

        def call(*inputs: torch.Tensor) -> torch.Tensor:
            # Donated buffers would refuse a second backward pass over the same graph.
            with torch._functorch.config.patch(donated_buffer=False):
                return compiled(*inputs)

        return call

    return _Who("torch.compile", get)


def _liger(call: Callable[[Any, Inputs], torch.Tensor]) -> _Who:
    """Liger-Kernel; ``call`` gets its functions and the inputs."""

    def get() -> Function:
        functions = importlib.import_module("liger_kernel.transformers.functional")
        return lambda *inputs: call(functions, inputs)

    return _Who("Liger-Kernel", get, only_on="cuda")


def _each_mode(
    name: str,
    make: Make,
    who: tuple[_Who, ...],
    *,
    columns: tuple[int, int] | None,
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


def _moved(mode: str, columns: tuple[int, int] | None) -> Callable[[torch.dtype], float] | None:
    if columns is None:
        return None
    count = {"forward": columns[0], "backward": columns[1], "both": sum(columns)}[mode]
    return lambda dtype: count * dtype.itemsize


# --- operations -----------------------------------------------------------------------------------


def _layer_norm() -> Iterator[Op]:
    def torch_s(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, EPS)

    who = (
        _given("apex", lambda x, weight, bias: layer_norm(x, weight, bias, weight.shape, EPS)),
        _given("torch", torch_s),
        _compiled(torch_s),
        _liger(lambda liger, inputs: liger.liger_layer_norm(*inputs, EPS)),
    )
    return _each_mode("layer_norm", _rows, who, columns=(2, 3))


def _rms_norm() -> Iterator[Op]:
    def torch_s(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, EPS)

    def written_out(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        return weight * wide.to(x.dtype)

    def make(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Inputs:
        return _rows(shapes, dtype, device)[:2]

    who = (
        _given("apex", lambda x, weight: rms_norm(x, weight, weight.shape, EPS)),
        _given("torch", torch_s),
        _given("torch, written out", written_out),
        _compiled(torch_s),
        _liger(lambda liger, inputs: liger.liger_rms_norm(*inputs, EPS, in_place=False)),
    )
    return _each_mode("rms_norm", make, who, columns=(2, 3))


def _cross_entropy() -> Iterator[Op]:
    """A loss for each row, of logits."""

    def torch_s(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="none")

    who = (
        _given(
            "apex", lambda logits, labels: SoftmaxCrossEntropyLoss.apply(logits, labels, 0.0, -1)
        ),
        _given("torch", torch_s),
        _compiled(torch_s),
        _liger(lambda liger, inputs: liger.liger_cross_entropy(*inputs, reduction="none")),
    )
    return _each_mode("cross_entropy", _logits, who, columns=(1, 2))


def _linear_cross_entropy() -> Iterator[Op]:
    """The mean loss, of what makes the logits."""

    def torch_s(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), labels)

    who = (
        _given("apex", linear_cross_entropy),
        _given("torch", torch_s),
        _compiled(torch_s),
        _liger(lambda liger, inputs: liger.liger_fused_linear_cross_entropy(*inputs)),
    )
    return _each_mode("linear_cross_entropy", _before_logits, who, columns=None)


def _group_norm() -> Iterator[Op]:
    def groups(images: torch.Tensor) -> int:
        return math.gcd(GROUPS, images.shape[1])

    def torch_s(images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # What F.group_norm calls after it has refused the single element of the host's cost.
        return torch.group_norm(images, groups(images), weight, bias, EPS)

    def liger_s(liger: Any, inputs: Inputs) -> torch.Tensor:
        images = inputs[0]
        y: torch.Tensor = liger.liger_group_norm(*inputs, images.shape[1], groups(images), EPS)
        return y

    who = (
        _given("apex", lambda x, weight, bias: group_norm(x, groups(x), weight, bias, eps=EPS)),
        _given("torch", torch_s),
        _compiled(torch_s),
        _liger(liger_s),
    )
    return _each_mode("group_norm", _images, who, columns=(2, 3), shapes=IMAGES)


LAYERS: tuple[Op, ...] = (
    *_layer_norm(),
    *_rms_norm(),
    *_cross_entropy(),
    *_linear_cross_entropy(),
    *_group_norm(),
)
