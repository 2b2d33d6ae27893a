"""Lion over lists of tensors.

    g = factor * grad
    update = sign(beta1 * exp_avg + (1 - beta1) * g)
    param -= lr * (update + weight_decay * param)
    exp_avg = beta2 * exp_avg + (1 - beta2) * g

The sign of nan is nan. Weight decay is decoupled; there is no other.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, program 1.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from apex._compat import private
from apex.ops.lists.multi_tensor import Update, Values
from apex.ops.lists.storage import DEFAULT_OPTIONS, StepOptions
from apex.ops.lists.tensor_lists import Scalar, TensorList
from apex.ops.updates import cpu_fused

_List = list[torch.Tensor]

# What the update takes: "rest1" is 1 - beta1, rounded once, and so is "rest2".
LionScalars = namedtuple("LionScalars", "factor lr weight_decay beta1 rest1 beta2 rest2")


def reference(values: Values, s: LionScalars) -> Values:
    """Compute the definition."""
    grad, param, average = values[:3]
    grad = grad * s.factor
    mean = s.beta1 * average + s.rest1 * grad
    update = torch.where(mean.isnan(), mean, mean.sign())  # torch's sign of nan is 0
    param = param - s.lr * (update + s.weight_decay * param)
    return param, s.beta2 * average + s.rest2 * grad, grad


LION = Update(reference, "lion:lion", LionScalars)


class Lion(NamedTuple):
    """The hyperparameters: ``beta1`` is for the update's sign, ``beta2`` for the average kept."""

    lr: Scalar
    beta1: float
    beta2: float
    weight_decay: Scalar

    def scalars(self, factor: Scalar) -> LionScalars:
        """What the update takes."""
        lr, beta1, beta2, decay = self
        return LionScalars(factor, lr, decay, beta1, 1 - beta1, beta2, 1 - beta2)


def lion_(
    columns: Sequence[TensorList], hyper: Lion, options: StepOptions = DEFAULT_OPTIONS
) -> None:
    """Take one step; the state is the average."""
    cpu_fused.step_or_run(LION, _by_foreach, columns, hyper, options)


def _by_foreach(hyper: Lion) -> Callable[..., None]:
    """Torch's foreach functions for float32 columns of the CPU.

    1,000 tensors of 8 x 8 take a quarter of the definition's time (AMD EPYC, one thread). The sign
    is a multiple of 2**-22, the smallest number times 2**127, so that nan stays nan, and 0 0.
    """
    _, rate, decay, beta1, rest1, beta2, rest2 = hyper.scalars(1.0)
    lr, small = float(rate), 2.0**-22
    numbers = map(cpu_fused.number, (beta1, beta2, 2.0**127, 1 - lr * float(decay)))
    first, second, large, shrunk = numbers

    def kernel(*columns: _List) -> None:
        for grads, params, averages in cpu_fused.batches(columns):
            update = private.foreach_mul(averages, first)
            private.foreach_add_(update, grads, alpha=rest1)
            private.foreach_mul_(update, large)
            private.foreach_clamp_min_(update, -small)
            private.foreach_clamp_max_(update, small)
            if decay:
                private.foreach_mul_(params, shrunk)
            private.foreach_add_(params, update, alpha=-lr / small)
            private.foreach_mul_(averages, second)
            private.foreach_add_(averages, grads, alpha=rest2)

    return kernel
