"""One step of each optimizer as a formula in float64, for one tensor.

These are separate from the library's definitions on purpose. `Step` holds what a formula may use;
the formula returns the new weight and the new state by the names of `optimizer.state`. Tests
compare Adam, SGD and Adagrad with `torch.optim` in float64, bit for bit but for a few roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

__all__ = [
    "Formula",
    "Step",
    "adagrad",
    "adam",
    "adam_eps_inside",
    "lamb",
    "lion",
    "novograd",
    "sgd",
]

State = dict[str, torch.Tensor]


class Step(NamedTuple):
    """What a step starts from.

    Attributes:
        number: Which step it is, from 1.
        group: The options: ``lr``, ``weight_decay``, ...
        grad: The gradient, unscaled and clipped.
        param: The weight.
        state: State before the step; empty at the first.
    """

    number: int
    group: Mapping[str, Any]
    grad: torch.Tensor
    param: torch.Tensor
    state: State


Formula = Callable[[Step], tuple[torch.Tensor, State]]


def _moments(step: Step, grad: torch.Tensor) -> tuple[State, torch.Tensor, torch.Tensor]:
    """Adam's moments: as they are kept, and corrected for their start at 0."""
    beta1, beta2 = step.group["betas"]
    zero = torch.zeros_like(grad)
    exp_avg = beta1 * step.state.get("exp_avg", zero) + (1 - beta1) * grad
    exp_avg_sq = beta2 * step.state.get("exp_avg_sq", zero) + (1 - beta2) * grad**2
    unbiased = exp_avg / (1 - beta1**step.number), exp_avg_sq / (1 - beta2**step.number)
    return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, *unbiased


def adam(*, decoupled: bool) -> Formula:
    """AdamW, or Adam with an L2 penalty."""

    def formula(step: Step) -> tuple[torch.Tensor, State]:
        group, param = step.group, step.param
        decay = group["weight_decay"] * param
        state, mean, square = _moments(step, step.grad if decoupled else step.grad + decay)
        update = mean / (square.sqrt() + group["eps"])
        return param - group["lr"] * (update + decay if decoupled else update), state

    return formula


def adam_eps_inside(step: Step) -> tuple[torch.Tensor, State]:
    """The Adam of 2019: corrections in the learning rate, ``eps`` below the root."""
    group, param = step.group, step.param
    beta1, beta2 = group["betas"]
    state, _, _ = _moments(step, step.grad)
    rate = group["lr"] * (1 - beta2**step.number) ** 0.5 / (1 - beta1**step.number)
    update = state["exp_avg"] / (state["exp_avg_sq"] + group["eps"]).sqrt()
    return param - rate * (update + group["weight_decay"] * param), state


def lamb(step: Step) -> tuple[torch.Tensor, State]:
    """LAMB: AdamW's step, times the ratio of the norms of weight and step."""
    group, param = step.group, step.param
    state, mean, square = _moments(step, step.grad)
    update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * param
    ratio = param.norm() / update.norm() if group["weight_decay"] and update.any() else 1.0
    return param - group["lr"] * (ratio or 1.0) * update, state


def sgd(step: Step) -> tuple[torch.Tensor, State]:
    """SGD with momentum, dampening and Nesterov's variant."""
    group, momentum = step.group, step.group["momentum"]
    grad = step.grad + group["weight_decay"] * step.param
    if not momentum:
        return step.param - group["lr"] * grad, {}
    before = step.state.get("momentum_buffer")
    buffer = grad if before is None else momentum * before + (1 - group["dampening"]) * grad
    update = grad + momentum * buffer if group["nesterov"] else buffer
    return step.param - group["lr"] * update, {"momentum_buffer": buffer}


def adagrad(step: Step) -> tuple[torch.Tensor, State]:
    """Adagrad with an L2 penalty."""
    group = step.group
    grad = step.grad + group["weight_decay"] * step.param
    total = step.state.get("sum", torch.zeros_like(grad)) + grad**2
    return step.param - group["lr"] * grad / (total.sqrt() + group["eps"]), {"sum": total}


def lion(step: Step) -> tuple[torch.Tensor, State]:
    """Lion."""
    group, before = step.group, step.state.get("exp_avg", torch.zeros_like(step.grad))
    beta1, beta2 = group["betas"]
    update = (beta1 * before + (1 - beta1) * step.grad).sign() + group["weight_decay"] * step.param
    exp_avg = beta2 * before + (1 - beta2) * step.grad
    return step.param - group["lr"] * update, {"exp_avg": exp_avg}


def novograd(step: Step) -> tuple[torch.Tensor, State]:
    """NovoGrad with decoupled decay; ``state["norm"]`` is the tensor's second moment, a norm."""
    group, param, number = step.group, step.param, step.number
    beta1, beta2 = group["betas"]
    current = step.grad.norm()
    norm = step.state.get("norm", current)
    norm = (beta2 * norm**2 + (1 - beta2) * current**2).sqrt()
    before = step.state.get("exp_avg", torch.zeros_like(param))
    exp_avg = beta1 * before + (1 - beta1) * step.grad
    scale = norm / (1 - beta2**number) ** 0.5 + group["eps"]
    update = exp_avg / (1 - beta1**number) / scale + group["weight_decay"] * param
    return param - group["lr"] * update, {"exp_avg": exp_avg, "norm": norm}
