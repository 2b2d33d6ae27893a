"""NovoGrad over lists of tensors: Adam with one second moment for each tensor.

    g = factor * grad
    norm = sqrt(beta2 * norm^2 + (1 - beta2) * |g|_2^2)    or, with the largest magnitude,
    norm = beta2 * norm + (1 - beta2) * |g|_inf
    scale = norm / sqrt(1 - beta2 ** step) + eps

with weight decay in the moment

    exp_avg = beta1 * exp_avg + share * (g / scale + decay * param)
    param -= lr * exp_avg / c1

or decoupled from it

    exp_avg = beta1 * exp_avg + share * g
    param -= lr * ((exp_avg / c1) / scale + decay * param)

where ``share`` is ``1 - beta1`` or 1, and ``c1 = 1 - beta1 ** step``. A norm of -1 stands for none
yet: the first becomes the gradient's own. ``factor`` is what the gradient is multiplied by on the
way in: 1 / loss scale, times a clipping coefficient.

Norms are computed and kept where the tensors are; nothing waits for them.

On a CPU float32 tensors go by torch's foreach functions, in pieces that stay in the cache.

Source: Ginsburg et al., arXiv:1905.11286, algorithm 1; the decoupled form and the bias corrections
are those of NVIDIA Apex.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apex.ops.adam import unbiased
from apex.ops.host import as_float32, host_can
from apex.ops.multi_tensor import Column, Scalar, Update, Values, batches
from apex.ops.norms import l2_norms, max_norms
from apex.ops.storage import PLAINLY, How, run_stored

UNSET = -1.0
# Elements that are taken at once on a CPU: 1 MiB of each column.
PIECE = 2**18


def reference(values: Values, scalars: Sequence[Any], own: Sequence[Any]) -> Values:
    """Compute the definition; ``own``: what gradient and moment are divided by."""
    grad, param, exp_avg = values[:3]
    factor, lr, beta1, share, unbias1, l2, decay = scalars[:7]
    grad = grad * factor
    total = grad / own[0] + l2 * param
    exp_avg = beta1 * exp_avg + share * total
    update = (exp_avg * unbias1) / own[1] + decay * param
    return param - lr * update, exp_avg, grad


NOVOGRAD = Update(reference, "novograd:novograd")


@dataclass(frozen=True)
class NovoGrad:
    """The numbers of one step.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the moment.
        beta2: Decay of the norms.
        eps: Added to the corrected norm.
        weight_decay: Its size.
        reg_inside_moment: Whether the decay enters the moment, or is decoupled from it.
        grad_averaging: Whether a gradient enters the moment by ``1 - beta1`` or whole.
        norm_type: 2, or 0 for the largest magnitude.
        bias_correction: Whether moment and norm are corrected for their start.
        step: Which step this is, from 1; a tensor is read on its device.
    """

    lr: Scalar
    beta1: float
    beta2: float
    eps: float
    weight_decay: Scalar
    reg_inside_moment: bool
    grad_averaging: bool
    norm_type: int
    bias_correction: bool
    step: int | torch.Tensor

    def scalars(self, factor: Scalar) -> tuple[Scalar, ...]:
        """What :func:`reference` and the kernel take."""
        decay = self.weight_decay
        l2, decoupled = (decay, 0.0) if self.reg_inside_moment else (0.0, decay)
        share = 1 - self.beta1 if self.grad_averaging else 1.0
        unbias1 = unbiased(self.beta1, self.step) if self.bias_correction else 1.0
        return factor, self.lr, self.beta1, share, unbias1, l2, decoupled

    def blended(self, norms: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        """The new norms, from those so far and the gradients'."""
        norms = torch.where(norms < 0, current, norms)
        rest = 1 - self.beta2
        if self.norm_type == 0:
            return self.beta2 * norms + rest * current
        return torch.sqrt(self.beta2 * norms * norms + rest * current * current)

    def scales(self, norms: torch.Tensor) -> torch.Tensor:
        """What the norms make of gradient or moment: they are divided by it."""
        if not self.bias_correction:
            return norms + self.eps
        unbias2 = unbiased(self.beta2, self.step)
        if isinstance(unbias2, torch.Tensor):
            return norms * torch.sqrt(unbias2) + self.eps
        return norms * math.sqrt(unbias2) + self.eps


@torch.no_grad()
def novograd_(
    columns: Sequence[Column], norms: torch.Tensor, numbers: NovoGrad, how: How = PLAINLY
) -> None:
    """Take one step, in place.

    Args:
        columns: Gradients, weights, moments; each of one dtype, all on one device and of the same
            sizes.
        norms: float32 on that device, one for each tensor.
        numbers: Of the step.
        how: Scaling, skipping and storage.
    """
    measure = max_norms if numbers.norm_type == 0 else l2_norms
    new = numbers.blended(norms, measure(columns[0], factor=how.factor))
    if how.noop is not None:
        new = torch.where(how.noop.reshape(()) != 0, norms, new)
    norms.copy_(new)
    scales = numbers.scales(norms)
    known = (numbers.lr, numbers.weight_decay, numbers.step)
    can = how.noop is None and host_can(columns, how, *known)
    if can and not (how.write_grads and how.factor != 1.0):
        with as_float32(columns, how, write_grads=False) as wide:
            _on_host(wide, scales, numbers, how)
        return
    ones = torch.ones_like(scales)
    own = (scales, ones) if numbers.reg_inside_moment else (ones, scales)
    run_stored(NOVOGRAD, columns, numbers.scalars(how.factor), how, own=own)


# -- torch's foreach functions on the CPU --------------------------------------------------------


def _on_host(columns: Sequence[Column], scales: torch.Tensor, numbers: NovoGrad, how: How) -> None:
    """Compute the definition in passes over pieces that stay in the cache."""
    factor, lr, beta1, share, unbias1, l2, decay = map(float, numbers.scalars(how.factor))
    own = share * factor if numbers.reg_inside_moment else -lr * unbias1
    shares = (own / scales.double()).float().tolist()
    for where, (grads, params, exp_avgs) in batches(columns, PIECE):
        mine = shares[where.start : where.stop]
        torch._foreach_mul_(exp_avgs, beta1)
        if numbers.reg_inside_moment:
            for exp_avg, grad, part in zip(exp_avgs, grads, mine, strict=True):
                exp_avg.add_(grad, alpha=part)
            if l2:  # not 0 times a weight of inf or nan
                torch._foreach_add_(exp_avgs, params, alpha=share * l2)
            torch._foreach_add_(params, exp_avgs, alpha=-lr * unbias1)
            continue
        torch._foreach_add_(exp_avgs, grads, alpha=share * factor)
        updates = torch._foreach_mul(params, -lr * decay) if decay else params
        for update, exp_avg, rate in zip(updates, exp_avgs, mine, strict=True):
            update.add_(exp_avg, alpha=rate)
        if decay:  # so the weight is rounded once
            torch._foreach_add_(params, updates)
