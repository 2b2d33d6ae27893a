"""One step of each algorithm as a formula in float64, for one tensor.

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
        group: Options of the constructor and of the group: ``lr``, ``weight_decay``, ...
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


def adam(step: Step) -> tuple[torch.Tensor, State]:
    """AdamW, or Adam with an L2 penalty."""
    group, param = step.group, step.param
    decay, decoupled = group["weight_decay"] * param, group.get("adam_w_mode", True)
    state, mean, square = _moments(step, step.grad if decoupled else step.grad + decay)
    update = mean / (square.sqrt() + group["eps"])
    return param - group["lr"] * (update + decay if decoupled else update), state


def adam_eps_inside(step: Step) -> tuple[torch.Tensor, State]:
    """The Adam of 2019: corrections in the learning rate, ``eps`` below the root."""
    group, param = step.group, step.param
    beta1, beta2 = group["betas"]
    state, _, _ = _moments(step, step.grad)
    rate = group["lr"] * (1 - beta2**step.number) ** 0.5 / (1 - beta1**step.number)
    update = state["exp_avg"] / (state["exp_avg_sq"] + group["eps"]).sqrt()
    return param - rate * (update + group["weight_decay"] * param), state


def lamb(step: Step) -> tuple[torch.Tensor, State]:
    """LAMB: Adam's step, times the ratio of the norms of weight and step."""
    group, param = step.group, step.param
    decay, decoupled = group["weight_decay"] * param, group.get("adam_w_mode", True)
    state, mean, square = _moments(step, step.grad if decoupled else step.grad + decay)
    update = mean / (square.sqrt() + group["eps"])
    update = update + decay if decoupled else update
    ratio = param.norm() / update.norm() if group["weight_decay"] and update.any() else 1.0
    return param - group["lr"] * (ratio or 1.0) * update, state


def sgd(step: Step) -> tuple[torch.Tensor, State]:
    """SGD with momentum, dampening and Nesterov's variant; weight decay before or after them."""
    group, momentum = step.group, step.group["momentum"]
    decay, after = group["weight_decay"] * step.param, group.get("wd_after_momentum", False)
    grad, state = (step.grad if after else step.grad + decay), {}
    if momentum:
        before = step.state.get("momentum_buffer")
        buffer = grad if before is None else momentum * before + (1 - group["dampening"]) * grad
        grad = grad + momentum * buffer if group["nesterov"] else buffer
        state = {"momentum_buffer": buffer}
    return step.param - group["lr"] * (grad + decay if after else grad), state


def adagrad(step: Step) -> tuple[torch.Tensor, State]:
    """Adagrad with an L2 penalty, or with decoupled decay."""
    group = step.group
    decay, decoupled = group["weight_decay"] * step.param, group.get("adagrad_w_mode", False)
    grad = step.grad if decoupled else step.grad + decay
    total = step.state.get("sum", torch.zeros_like(grad)) + grad**2
    update = grad / (total.sqrt() + group["eps"])
    return step.param - group["lr"] * (update + decay if decoupled else update), {"sum": total}


def lion(step: Step) -> tuple[torch.Tensor, State]:
    """Lion."""
    group, before = step.group, step.state.get("exp_avg", torch.zeros_like(step.grad))
    beta1, beta2 = group["betas"]
    update = (beta1 * before + (1 - beta1) * step.grad).sign() + group["weight_decay"] * step.param
    exp_avg = beta2 * before + (1 - beta2) * step.grad
    return step.param - group["lr"] * update, {"exp_avg": exp_avg}


def novograd(step: Step) -> tuple[torch.Tensor, State]:
    """NovoGrad; ``state["norm"]`` is the tensor's second moment, a norm."""
    group, param, number = step.group, step.param, step.number
    beta1, beta2 = group["betas"]
    largest = group.get("norm_type") == 0
    entries = torch.cat([step.grad.flatten(), step.grad.new_zeros(1)])  # there may be none
    current = entries.norm(torch.inf if largest else 2)
    norm = step.state.get("norm", current)
    if largest:
        norm = beta2 * norm + (1 - beta2) * current
    else:
        norm = (beta2 * norm**2 + (1 - beta2) * current**2).sqrt()
    scale = norm / (1 - beta2**number) ** 0.5 + group["eps"]
    decay, inside = group["weight_decay"] * param, group.get("reg_inside_moment", False)
    grad = step.grad / scale + decay if inside else step.grad
    exp_avg = beta1 * step.state.get("exp_avg", torch.zeros_like(param)) + (1 - beta1) * grad
    update = exp_avg / (1 - beta1**number)
    update = update if inside else update / scale + decay
    return param - group["lr"] * update, {"exp_avg": exp_avg, "norm": norm}
