"""Adagrad over lists of tensors.

    g = factor * grad + l2 * param
    sum += g^2
    param -= lr * (g / (sqrt(sum) + eps) + decay * param)

``l2`` or ``decay`` is the weight decay, in the gradient or decoupled from it. ``factor`` is what
the gradient is multiplied by on the way in: 1 / loss scale, times a clipping coefficient.

Source: Duchi, Hazan and Singer, "Adaptive subgradient methods", JMLR 12, 2011.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apex.ops.host import Lists, host_can, on_host
from apex.ops.multi_tensor import Column, Scalar, Update, Values
from apex.ops.storage import PLAINLY, How, run_stored


def reference(values: Values, scalars: Sequence[Any], own: Sequence[Any]) -> Values:
    """Compute the definition; see :meth:`Adagrad.scalars`."""
    grad, param, squares = values[:3]
    factor, lr, eps, l2, decay = scalars[:5]
    grad = grad * factor
    total = grad + l2 * param
    squares = squares + total * total
    update = total / (torch.sqrt(squares) + eps) + decay * param
    return param - lr * update, squares, grad


ADAGRAD = Update(reference, "adagrad:adagrad")


@dataclass(frozen=True)
class Adagrad:
    """The numbers of one step.

    Attributes:
        lr: Learning rate.
        eps: Added to the root.
        weight_decay: L2 penalty, or decoupled decay with ``adagrad_w_mode``.
        adagrad_w_mode: Which of the two.
    """

    lr: Scalar
    eps: float
    weight_decay: Scalar
    adagrad_w_mode: bool

    def scalars(self, factor: Scalar) -> tuple[Scalar, ...]:
        """What :func:`reference` and the kernel take."""
        decay = self.weight_decay
        l2, decoupled = (0.0, decay) if self.adagrad_w_mode else (decay, 0.0)
        return factor, self.lr, self.eps, l2, decoupled


def adagrad_(columns: Sequence[Column], numbers: Adagrad, how: How = PLAINLY) -> None:
    """Take one step, in place.

    Args:
        columns: Gradients, weights, sums of squares; each of one dtype, all on one device and of
            the same sizes.
        numbers: Of the step.
        how: Scaling, skipping and storage.
    """
    lr, decay = numbers.lr, numbers.weight_decay
    if not (numbers.adagrad_w_mode and decay) and host_can(columns, how, lr, decay):
        on_host(functools.partial(_torchs, numbers), columns, how, narrow=True)
        return
    run_stored(ADAGRAD, columns, numbers.scalars(how.factor), how)


def _torchs(numbers: Adagrad, columns: Lists) -> None:
    """Step columns of one dtype on the CPU by torch's fused kernel."""
    grads, params, sums = columns
    torch._fused_adagrad_(
        params,
        grads,
        sums,
        [torch.ones(())] * len(params),  # the step, which matters with lr_decay only
        lr=float(numbers.lr),
        lr_decay=0.0,
        weight_decay=float(numbers.weight_decay),
        eps=numbers.eps,
        maximize=False,
    )
