"""Lion over lists of tensors.

    g = factor * grad
    update = sign(beta1 * exp_avg + (1 - beta1) * g)
    param -= lr * (update + weight_decay * param)
    exp_avg = beta2 * exp_avg + (1 - beta2) * g

``factor`` is what the gradient is multiplied by on the way in: 1 / loss scale, times a clipping
coefficient. The sign of nan is nan. Weight decay is decoupled; there is no other.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, program 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from apex.ops.lists.columns import Column, Scalar
from apex.ops.lists.multi_tensor import Update, Values
from apex.ops.lists.storage import DEFAULT_OPTIONS, StepOptions, run_stored


class LionScalars(NamedTuple):
    """What the update takes: ``rest1`` is 1 - ``beta1``, rounded once, and so is ``rest2``."""

    factor: Scalar
    lr: Scalar
    weight_decay: Scalar
    beta1: Scalar
    rest1: Scalar
    beta2: Scalar
    rest2: Scalar


def reference(values: Values, s: LionScalars) -> Values:
    """Compute the definition."""
    grad, param, average = values[:3]
    grad = grad * s.factor
    mean = s.beta1 * average + s.rest1 * grad
    update = torch.where(mean.isnan(), mean, mean.sign())  # torch's sign of nan is 0
    param = param - s.lr * (update + s.weight_decay * param)
    return param, s.beta2 * average + s.rest2 * grad, grad


LION = Update(reference, "lion:lion", LionScalars)


def lion_(
    columns: Sequence[Column], scalars: LionScalars, options: StepOptions = DEFAULT_OPTIONS
) -> None:
    """Take one step, in place.

    Args:
        columns: Gradients, weights, averages; each of one dtype, all on one device and of the same
            sizes.
        scalars: Of the step.
        options: Skipping and storage.
    """
    run_stored(LION, columns, scalars, options)
