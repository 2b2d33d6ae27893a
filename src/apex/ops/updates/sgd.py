"""SGD with momentum over lists of tensors.

    g = factor * grad + l2 * param
    buffer = momentum * buffer + (1 - dampening) * g       (g alone where it has no history)
    update = g + momentum * buffer  if nesterov else  buffer
    param -= lr * (update + late_decay * param)

Without momentum ``update`` is ``g`` and there is no buffer. ``late_decay`` is the weight decay
where it is added after the momentum.

Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
2013, with the learning rate outside of the buffer as in PyTorch.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from apex._compat import private
from apex.ops.lists.multi_tensor import Update, Values
from apex.ops.lists.storage import DEFAULT_OPTIONS, StepOptions
from apex.ops.lists.tensor_lists import Scalar, TensorList
from apex.ops.updates import cpu_fused
from apex.ops.updates.adam import l2_and_decay

_List = list[torch.Tensor]


SGDScalars = namedtuple("SGDScalars", "factor lr weight_decay")
# "lookahead" is the momentum once more for Nesterov's update, else 0; "first" is not 0 where the
# buffer has no history.
MomentumScalars = namedtuple(
    "MomentumScalars", "factor lr momentum one_minus_dampening l2 late_decay lookahead first"
)


def plain_reference(values: Values, s: SGDScalars) -> Values:
    """Compute the definition without momentum."""
    grad, param = values[:2]
    grad = grad * s.factor
    return param - s.lr * (grad + s.weight_decay * param), grad


def reference(values: Values, s: MomentumScalars) -> Values:
    """Compute the definition with momentum."""
    grad, param, buffer = values[:3]
    grad = grad * s.factor
    total = grad + s.l2 * param
    buffer = s.momentum * buffer + s.one_minus_dampening * total
    if isinstance(s.first, torch.Tensor):
        buffer = torch.where(s.first != 0, total + 0.0, buffer)  # never -0.0, see FusedSGD
    update = total + s.lookahead * buffer if s.lookahead else buffer
    return param - s.lr * (update + s.late_decay * param), buffer, grad


WITHOUT_MOMENTUM = Update(plain_reference, "sgd:sgd", SGDScalars)
MOMENTUM = Update(reference, "sgd:momentum", MomentumScalars)


class SGD(NamedTuple):
    """The hyperparameters; ``wd_after_momentum`` adds the weight decay after the momentum."""

    lr: Scalar
    momentum: float
    dampening: float
    weight_decay: Scalar
    nesterov: bool
    wd_after_momentum: bool

    def scalars(self, factor: Scalar, first: Scalar = 0.0) -> Any:
        """What the update takes, with momentum or without."""
        if not self.momentum:
            return SGDScalars(factor, self.lr, self.weight_decay)
        return MomentumScalars(
            factor, self.lr, self.momentum, 1 - self.dampening,
            *l2_and_decay(self.weight_decay, self.wd_after_momentum),
            self.momentum if self.nesterov else 0.0, first,
        )  # fmt: skip


def sgd_(
    columns: Sequence[TensorList],
    hyper: SGD,
    options: StepOptions = DEFAULT_OPTIONS,
    first: torch.Tensor | None = None,
) -> None:
    """Take one step; the state is the momentum buffer, with momentum.

    Args:
        columns: Gradients, weights, and buffers.
        hyper: Of the step.
        options: Scaling, skipping and storage.
        first: float32, a number for each tensor: not 0 where its buffer has no history and becomes
            the gradient itself. Without it a buffer without history holds zeros.
    """
    late = hyper.wd_after_momentum and hyper.momentum and hyper.weight_decay
    kernel = None if late or first is not None else _torchs
    scalars = None if first is None else hyper.scalars(options.factor, first)
    update = MOMENTUM if hyper.momentum else WITHOUT_MOMENTUM
    cpu_fused.step_or_run(update, kernel, columns, hyper, options, scalars=scalars)


def _torchs(hyper: SGD) -> Callable[..., None]:
    """Torch's fused kernel for float32 columns of the CPU."""

    def kernel(grads: _List, params: _List, buffers: _List | tuple[()] = ()) -> None:
        private.fused_sgd_(
            params, grads, buffers,
            weight_decay=float(hyper.weight_decay), momentum=hyper.momentum, lr=float(hyper.lr),
            dampening=hyper.dampening, nesterov=hyper.nesterov, maximize=False, is_first_step=False,
        )  # fmt: skip

    return kernel
