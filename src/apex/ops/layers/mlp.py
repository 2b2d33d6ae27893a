"""Dense layers with an activation after each; `apex.ops.layers.dense` says why there is no kernel.

ReLU and sigmoid overwrite the product, since their gradients are functions of ``y`` alone
(``y > 0`` and ``y * (1 - y)``): no second buffer while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from apex.ops._check import ArgumentError
from apex.ops._dtypes import Optional
from apex.ops.layers import dense

ACTIVATIONS = ("none", "relu", "sigmoid")  # at the index that mlp_cuda calls them by
_IN_PLACE = (lambda y: y, torch.relu_, torch.sigmoid_)
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
        x = _IN_PLACE[activation](F.linear(x, weight, bias))
        yield x


def output_of(name: str, bias: bool, activation: int, args: Sequence[torch.Tensor]) -> torch.Tensor:
    """The last of :func:`outputs_of`, of the arguments of :func:`parts`, with its errors."""
    x, weights, biases = _sorted(name, bias, activation, args)
    try:
        if all(map(dense.left_to_torch, weights, biases)):
            y = x if x.dim() == 2 else dense.rows(x)  # of a view autograd would copy gradients
            activate = _IN_PLACE[activation]
            for weight, each in zip(weights, biases, strict=True):
                y = activate(F.linear(y, weight, each))
            return y if x.dim() == 2 else y.reshape(*x.shape[:-1], y.shape[-1])
    except (AttributeError, RuntimeError, TypeError):
        pass  # below are the words for what does not fit together
    _check(name, x, weights, biases)
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
    found = _sorted(name, bias, activation, args)
    _check(name, *found)
    return found


def _sorted(
    name: str, bias: bool, activation: int, args: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[Optional]]:
    count, rest = divmod(len(args) - 1, 2 if bias else 1)
    if count < 1 or rest:
        wanted = "an input, weights and as many biases" if bias else "an input and weights"
        raise ArgumentError(f"{name}: there are {len(args)} tensors. Pass {wanted}.")
    if activation not in range(len(ACTIVATIONS)):
        known = ", ".join(f"{i} ({key})" for i, key in enumerate(ACTIVATIONS))
        raise ArgumentError(f"{name}: activation is {activation!r}; allowed are {known}.")
    x, weights = args[0], args[1 : count + 1]
    biases: Sequence[Optional] = args[count + 1 :] or [None] * count
    return x, weights, biases


def _check(
    name: str, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[Optional]
) -> None:
    by_name = {f"weight_{i}": weight for i, weight in enumerate(weights)}
    dense.check(name, x, by_name, {f"bias_{i}": each for i, each in enumerate(biases)})
