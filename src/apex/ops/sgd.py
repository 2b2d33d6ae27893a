"""SGD with momentum over lists of tensors.

    g = factor * grad + l2 * param
    buffer = momentum * buffer + (1 - dampening) * g       (g alone where it has no history)
    update = g + momentum * buffer  if nesterov else  buffer
    param -= lr * (update + after * param)

Without momentum ``update`` is ``g`` and there is no buffer. ``l2`` or ``after`` is the weight
decay: ``after`` adds it behind the momentum. ``factor`` is what the gradient is multiplied by on
the way in: 1 / loss scale, times a clipping coefficient.

Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
2013, with the learning rate outside of the buffer as in PyTorch.
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
    """Compute the definition with momentum; see :meth:`SGD.scalars`."""
    grad, param, buffer = values[:3]
    factor, lr, momentum, rest, l2, after, ahead = scalars[:7]
    grad = grad * factor
    total = grad + l2 * param
    carried = momentum * buffer + rest * total
    if own:
        carried = torch.where(own[0] != 0, total, carried)
    update = total + ahead * carried if ahead else carried
    return param - lr * (update + after * param), carried, grad


def plain_reference(values: Values, scalars: Sequence[Any], own: Sequence[Any]) -> Values:
    """Compute the definition without momentum; scalars: factor, lr, weight decay."""
    grad, param = values[:2]
    grad = grad * scalars[0]
    return param - scalars[1] * (grad + scalars[2] * param), grad


MOMENTUM = Update(reference, "sgd:momentum")
PLAIN = Update(plain_reference, "sgd:sgd")


@dataclass(frozen=True)
class SGD:
    """The numbers of one step.

    Attributes:
        lr: Learning rate.
        momentum: Decay of the buffer; 0 means that there is none.
        dampening: What is left out of each gradient that enters the buffer.
        weight_decay: L2 penalty.
        nesterov: Whether the gradient at the point ahead is estimated.
        wd_after_momentum: Whether the penalty is added behind the momentum.
    """

    lr: Scalar
    momentum: float
    dampening: float
    weight_decay: Scalar
    nesterov: bool
    wd_after_momentum: bool

    def scalars(self, factor: Scalar) -> tuple[Scalar, ...]:
        """What the definitions and the kernels take."""
        if not self.momentum:
            return factor, self.lr, self.weight_decay
        decay = self.weight_decay
        l2, after = (0.0, decay) if self.wd_after_momentum else (decay, 0.0)
        ahead = self.momentum if self.nesterov else 0.0
        return factor, self.lr, self.momentum, 1 - self.dampening, l2, after, ahead


def sgd_(
    columns: Sequence[Column],
    numbers: SGD,
    how: How = PLAINLY,
    first: torch.Tensor | None = None,
) -> None:
    """Take one step, in place.

    Args:
        columns: Gradients, weights, and with momentum buffers; each of one dtype, all on one device
            and of the same sizes.
        numbers: Of the step.
        how: Scaling, skipping and storage.
        first: float32, a number for each tensor: not 0 where its buffer has no history and becomes
            the gradient itself. Without it a buffer without history holds zeros.
    """
    lr, decay = numbers.lr, numbers.weight_decay
    after = numbers.wd_after_momentum and numbers.momentum
    if first is None and not (after and decay) and host_can(columns, how, lr, decay):
        on_host(functools.partial(_torchs, numbers), columns, how)
        return
    own = () if first is None else (first,)
    update = MOMENTUM if numbers.momentum else PLAIN
    run_stored(update, columns, numbers.scalars(how.factor), how, own=own)


def _torchs(numbers: SGD, columns: Lists) -> None:
    """Step float32 columns of the CPU by torch's fused kernel."""
    grads, params, *buffers = columns
    torch._fused_sgd_(
        params,
        grads,
        buffers[0] if buffers else [],
        weight_decay=float(numbers.weight_decay),
        momentum=numbers.momentum,
        lr=float(numbers.lr),
        dampening=numbers.dampening,
        nesterov=numbers.nesterov,
        maximize=False,
        is_first_step=False,
    )
