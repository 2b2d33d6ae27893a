"""Adam and AdamW over lists of tensors.

    g = factor * grad + l2 * param
    exp_avg    = beta1 * exp_avg    + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
    param -= lr * ((exp_avg / c1) / (sqrt(exp_avg_sq / c2) + eps) + decay * param)

with the bias corrections ``c = 1 - beta ** step``. ``l2`` or ``decay`` is the weight decay: the
first is Adam as published, the second AdamW. ``factor`` is what the gradient is multiplied by on
the way in: 1 / loss scale, times a clipping coefficient.

Source: Kingma and Ba, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter, arXiv:1711.05101,
algorithm 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apex.ops.host import Lists, host_can, on_host
from apex.ops.multi_tensor import Column, Scalar, Update, Values
from apex.ops.storage import PLAINLY, How, run_stored


def reference(values: Values, scalars: Sequence[Any], own: Sequence[Any]) -> Values:
    """Compute the definition; see :meth:`Adam.scalars`."""
    grad, param, exp_avg, exp_avg_sq = values[:4]
    factor, lr, beta1, rest1, beta2, rest2, eps, unbias1, unbias2, l2, decay = scalars[:11]
    grad = grad * factor
    total = grad + l2 * param
    exp_avg = beta1 * exp_avg + rest1 * total
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * total * total
    root = torch.sqrt(exp_avg_sq * unbias2) + eps
    update = (exp_avg * unbias1) / root + decay * param
    return param - lr * update, exp_avg, exp_avg_sq, grad


def reference_eps_inside(values: Values, scalars: Sequence[Any], own: Sequence[Any]) -> Values:
    """Compute the definition with ``sqrt(exp_avg_sq / c2 + eps)`` in the denominator."""
    grad, param, exp_avg, exp_avg_sq = values[:4]
    factor, lr, beta1, rest1, beta2, rest2, eps, unbias1, unbias2, l2, decay = scalars[:11]
    grad = grad * factor
    total = grad + l2 * param
    exp_avg = beta1 * exp_avg + rest1 * total
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * total * total
    root = torch.sqrt(exp_avg_sq * unbias2 + eps)
    update = (exp_avg * unbias1) / root + decay * param
    return param - lr * update, exp_avg, exp_avg_sq, grad


ADAM = Update(reference, "adam:adam")
ADAM_EPS_INSIDE = Update(reference_eps_inside, "adam:adam_eps_inside")


def unbiased(beta: float, step: int | torch.Tensor) -> Scalar:
    """``1 / (1 - beta ** step)``; for a step on a device computed there, in float64."""
    if isinstance(step, torch.Tensor):
        return (1 / (1 - beta ** step.reshape(()).double())).float()
    return 1 / (1 - beta**step)


@dataclass(frozen=True)
class Adam:
    """The numbers of one step.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the corrected root.
        weight_decay: L2 penalty, or decoupled decay with ``adam_w_mode``.
        adam_w_mode: Which of the two.
        bias_correction: Whether the moments are corrected for their start at 0.
        step: Which step this is, from 1; a tensor is read on its device.
        eps_inside_sqrt: Add ``eps`` to the second moment instead, below the root.
    """

    lr: Scalar
    beta1: float
    beta2: float
    eps: float
    weight_decay: Scalar
    adam_w_mode: bool
    bias_correction: bool
    step: int | torch.Tensor
    eps_inside_sqrt: bool = False

    def scalars(self, factor: Scalar) -> tuple[Scalar, ...]:
        """What :func:`reference` and the kernel take."""
        unbias1: Scalar = 1.0
        unbias2: Scalar = 1.0
        if self.bias_correction:
            unbias1, unbias2 = unbiased(self.beta1, self.step), unbiased(self.beta2, self.step)
        l2, decay = (0.0, self.weight_decay) if self.adam_w_mode else (self.weight_decay, 0.0)
        return (
            factor,
            self.lr,
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.eps,
            unbias1,
            unbias2,
            l2,
            decay,
        )


def adam_(columns: Sequence[Column], numbers: Adam, how: How = PLAINLY) -> None:
    """Take one step, in place.

    Args:
        columns: Gradients, weights, first moments, second moments; each of one dtype, all on one
            device and of the same sizes.
        numbers: Of the step.
        how: Scaling, skipping and storage.
    """
    known = (numbers.lr, numbers.weight_decay, numbers.step)
    if not numbers.eps_inside_sqrt and host_can(columns, how, *known):
        on_host(functools.partial(_torchs, numbers), columns, how)
        return
    update = ADAM_EPS_INSIDE if numbers.eps_inside_sqrt else ADAM
    run_stored(update, columns, numbers.scalars(how.factor), how)


def _torchs(numbers: Adam, columns: Lists) -> None:
    """Step float32 columns of the CPU by torch's fused kernel."""
    grads, params, exp_avgs, exp_avg_sqs = columns
    steps = torch.tensor(float(numbers.step) if numbers.bias_correction else math.inf)
    fused = torch._fused_adamw_ if numbers.adam_w_mode else torch._fused_adam_
    fused(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [steps] * len(params),
        lr=float(numbers.lr),
        beta1=numbers.beta1,
        beta2=numbers.beta2,
        weight_decay=float(numbers.weight_decay),
        eps=numbers.eps,
        amsgrad=False,
        maximize=False,
    )
