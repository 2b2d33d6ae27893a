"""LARC over lists of tensors: a learning rate for each tensor, multiplied into its gradient.

    rate = trust * |param| / (|grad| + decay * |param| + eps)
    rate = min(rate / lr, 1)                                      with clipping
    grad = (grad + decay * param) * rate                          if both norms are above 0

The norms are float32. The optimizer that steps afterwards multiplies by ``lr``: with clipping the
learning rate is thus the smaller of the local and the global one, without it their product. Two
launches; nothing waits for the host.

Source: You et al., arXiv:1708.03888, section 5; the clipping is NVIDIA's.
"""

from __future__ import annotations

from collections import namedtuple

import torch

from apex.ops.lists.multi_tensor import Update, Values, run
from apex.ops.lists.stages import Kind, Stages, Sums
from apex.ops.lists.tensor_lists import Scalar, TensorList, scalar_on
from apex.ops.lists.tensor_norms import square_sums

LarcScalars = namedtuple("LarcScalars", "rate decay")  # of each tensor
SQUARES = Kind(2)  # what the first stage yields of each tensor: those of gradient and weight


def _larc(values: Values, s: LarcScalars) -> Values:
    return ((values[0] + s.decay * values[1]) * s.rate,)


LARC = Update(_larc, "larc:larc", LarcScalars)


@torch.no_grad()
def larc_stages(
    grads: TensorList,
    params: TensorList,
    *,
    lr: Scalar,
    weight_decay: Scalar,
    trust_coefficient: float,
    eps: float,
    clip: bool,
) -> Stages:
    """Multiply the local learning rates and the weight decay into the gradients, in place.

    Args:
        grads: Gradients, of one device and one dtype; parts of tensors, or whole ones. Each is
            written, so none shares memory with another, see :mod:`apex.ops.lists.overlaps`.
        params: Their weights, of one dtype.
        lr: The global learning rate; a tensor is read on its device.
        weight_decay: Of the local rate and of the gradient; a tensor is read on its device.
        trust_coefficient: What the ratio of norms is multiplied by.
        eps: Added to the denominator.
        clip: Whether the local rate is at most the global one.

    Yields:
        The sums of the squares of gradients and weights, :data:`SQUARES`. It is to be sent those
        of the whole tensors.
    """
    device = grads[0].device
    whole = yield Sums(square_sums([*grads, *params]).view(2, -1))
    grad, param = whole.sqrt()
    decay = scalar_on(weight_decay, device)
    rate = trust_coefficient * param / (grad + decay * param + eps)
    if clip:
        rate = (rate / scalar_on(lr, device)).clamp(max=1.0)
    usual = (grad != 0) & (param != 0)
    # torch's default dtype would decide that of two numbers
    decays = torch.where(usual, decay, param.new_zeros(()))
    scalars = LarcScalars(torch.where(usual, rate, 1.0), decays)
    run(LARC, [grads, params], ((0, 0),), scalars)
