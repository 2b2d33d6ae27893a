"""Dense layers with an activation after each; `apex.ops.layers.dense` says why there is no kernel.

ReLU and sigmoid overwrite the product, since their gradients are functions of ``y`` alone
(``y > 0`` and ``y * (1 - y)``): no second buffer while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import index

import torch
import torch.nn.functional as F

from apex.ops._check import FLOATS, ArgumentError
from apex.ops._dtypes import Optional
from apex.ops.layers import dense

ACTIVATIONS = ("none", "relu", "sigmoid")  # at the index that mlp_cuda calls them by
_IN_PLACE = {0: lambda y: y, 1: torch.relu_, 2: torch.sigmoid_}
_BACKWARD: tuple[Callable[..., torch.Tensor], ...] = (
    lambda dy, y: dy,
    lambda dy, y: torch.ops.aten.threshold_backward(dy, y, 0),
    torch.ops.aten.sigmoid_backward,
)


def outputs_of(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[Optional],
    activation: int,
) -> Iterator[torch.Tensor]:
    """Apply dense layers, an activation after each; yield the output of every layer."""
    for weight, bias in zip(weights, biases, strict=True):
        x = _IN_PLACE[index(activation)](F.linear(x, weight, bias))
        yield x


def output_of(name: str, bias: bool, activation: int, args: Sequence[torch.Tensor]) -> torch.Tensor:
    """The last of :func:`outputs_of`, of the arguments of :func:`parts`, with its errors."""
    count = len(args) // 2 if bias else len(args) - 1
    try:
        activate, x = _IN_PLACE[index(activation)], args[0]
        is_flat = x.dim() == 2
        y = x if is_flat else dense.rows(x)  # of a view autograd would copy gradients
        for at in range(1, count + 1):
            weight, each = args[at], args[at + count] if bias else None
            # What torch takes and `parts` refuses; dimensions and dtypes of weights show in `y`.
            if weight.is_meta:
                break
            if each is not None:
                size = each.numel()
                if each.dim() != 1 or type(size) is not int or (size == 1 and weight.shape[0] != 1):
                    break
            y = activate(F.linear(y, weight, each))
        else:
            if count and y.dim() == 2 and y.dtype in FLOATS:
                return y if is_flat else y.reshape(*x.shape[:-1], y.shape[-1])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        pass  # below are the words for what does not fit together
    x, weights, biases = parts(name, bias, activation, args)
    *_, y = outputs_of(dense.rows(x), weights, biases, activation)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    activation: int,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of ``x``, the weights and the biases, from the output of every layer."""
    d_weights, d_biases = [], []
    for weight, y, below in zip(
        reversed(weights), reversed(outputs), reversed([x, *outputs[:-1]]), strict=True
    ):
        dz = _BACKWARD[activation](dy, y)
        dy, d_weight, d_bias = dense.linear_backward(dz, below, weight)
        d_weights.append(d_weight)
        d_biases.append(d_bias)
    return dy, d_weights[::-1], d_biases[::-1]


def parts(
    name: str, bias: bool, activation: int, args: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[Optional]]:
    """Check the arguments of :func:`outputs_of`, all weights before all biases, and sort them.

    Returns:
        The input, weights and biases, which are ``None`` without ``bias``.

    Raises:
        ArgumentError: They do not fit together.
    """
    count, rest = divmod(len(args) - 1, 2 if bias else 1)
    if count < 1 or rest:
        wanted = (
            "an input, weights, and one bias for each weight" if bias else "an input and weights"
        )
        raise ArgumentError(f"{name}: got {len(args)} tensors. Pass {wanted}.")
    if not hasattr(activation, "__index__") or activation not in range(len(ACTIVATIONS)):
        known = ", ".join(f"{i} ({key})" for i, key in enumerate(ACTIVATIONS))
        raise ArgumentError(f"{name}: activation is {activation!r}; allowed are {known}.")
    x, weights = args[0], args[1 : count + 1]
    biases: Sequence[Optional] = args[count + 1 :] or [None] * count
    by_name = {f"weight_{i}": weight for i, weight in enumerate(weights)}
    dense.check(name, x, by_name, {f"bias_{i}": each for i, each in enumerate(biases)})
    return x, weights, biases
