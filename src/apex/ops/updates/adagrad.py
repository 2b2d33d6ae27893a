"""Adagrad over lists of tensors.

    g = factor * grad + l2 * param
    sum += g^2
    param -= lr * (g / (sqrt(sum) + eps) + decay * param)

Source: Duchi, Hazan and Singer, "Adaptive subgradient methods", JMLR 12, 2011.
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
from apex.ops.updates.adam import l2_and_decay

_List = list[torch.Tensor]


AdagradScalars = namedtuple("AdagradScalars", "factor lr eps l2 decay")


def reference(values: Values, s: AdagradScalars) -> Values:
    """Compute the definition."""
    grad, param, squares = values[:3]
    grad = grad * s.factor
    total = grad + s.l2 * param
    squares = squares + total * total
    update = total / (torch.sqrt(squares) + s.eps) + s.decay * param
    return param - s.lr * update, squares, grad


ADAGRAD = Update(reference, "adagrad:adagrad", AdagradScalars)


class Adagrad(NamedTuple):
    """The hyperparameters; ``adagrad_w_mode`` decouples the weight decay."""

    lr: Scalar
    eps: float
    weight_decay: Scalar
    adagrad_w_mode: bool

    def scalars(self, factor: Scalar) -> AdagradScalars:
        """What the update takes."""
        both = l2_and_decay(self.weight_decay, self.adagrad_w_mode)
        return AdagradScalars(factor, self.lr, self.eps, *both)


def adagrad_(
    columns: Sequence[TensorList], hyper: Adagrad, options: StepOptions = DEFAULT_OPTIONS
) -> None:
    """Take one step; the state is the sum of squares."""
    decoupled = hyper.adagrad_w_mode and hyper.weight_decay
    kernel = None if decoupled else _torchs
    cpu_fused.step_or_run(ADAGRAD, kernel, columns, hyper, options, narrow=True)


def _torchs(hyper: Adagrad) -> Callable[..., None]:
    """Torch's fused kernel for columns of one dtype on the CPU."""
    step = torch.ones((), device="cpu", dtype=torch.float32)  # which matters with lr_decay only

    def kernel(grads: _List, params: _List, sums: _List) -> None:
        private.fused_adagrad_(
            params, grads, sums, [step] * len(params), lr=float(hyper.lr), lr_decay=0.0,
            weight_decay=float(hyper.weight_decay), eps=hyper.eps, maximize=False,
        )  # fmt: skip

    return kernel
