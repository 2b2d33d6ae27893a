"""Adam and AdamW over lists of tensors.

    g = factor * grad + l2 * param
    exp_avg    = beta1 * exp_avg    + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
    param -= lr * ((exp_avg / c1) / (sqrt(exp_avg_sq / c2) + eps) + decay * param)

with the bias corrections ``c = 1 - beta ** step``. With ``l2`` this is Adam as published, with
``decay`` AdamW.

Source: Kingma and Ba, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter, arXiv:1711.05101,
algorithm 2.
"""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from apex._compat import private
from apex.ops.lists.multi_tensor import Update, Values
from apex.ops.lists.storage import DEFAULT_OPTIONS, StepOptions
from apex.ops.lists.tensor_lists import Scalar, TensorList
from apex.ops.updates import cpu_fused

_List = list[torch.Tensor]

# What the update takes; "unbias" are the inverses of the bias corrections.
AdamScalars = namedtuple(
    "AdamScalars",
    "factor lr beta1 one_minus_beta1 beta2 one_minus_beta2 eps unbias1 unbias2 l2 decay",
)


def reference(values: Values, s: AdamScalars, *, eps_inside: bool = False) -> Values:
    """Compute the definition; ``eps_inside``: with ``sqrt(exp_avg_sq / c2 + eps)`` below."""
    grad, param, exp_avg, exp_avg_sq = values[:4]
    grad = grad * s.factor
    total = grad + s.l2 * param
    exp_avg = s.beta1 * exp_avg + s.one_minus_beta1 * total
    exp_avg_sq = s.beta2 * exp_avg_sq + s.one_minus_beta2 * total * total
    variance = exp_avg_sq * s.unbias2
    root = torch.sqrt(variance + s.eps) if eps_inside else torch.sqrt(variance) + s.eps
    update = (exp_avg * s.unbias1) / root + s.decay * param
    return param - s.lr * update, exp_avg, exp_avg_sq, grad


ADAM = Update(reference, "adam:adam", AdamScalars)
ADAM_EPS_INSIDE = Update(
    functools.partial(reference, eps_inside=True), "adam:adam_eps_inside", AdamScalars
)


@dataclass(frozen=True, eq=False)
class DeviceSteps:
    """Which step this is for tensors whose groups count on a device.

    Bias corrections are computed for all groups at once: some ten small kernels for a step of the
    optimizer, where each group would need ten of its own.

    Attributes:
        counts: float64, a step for each group.
        runs: The groups of the tensors in order, and how many tensors each has.
        found: Corrections that were computed, by beta and root; all lists of a step share them.
    """

    counts: torch.Tensor
    runs: Sequence[tuple[int, int]] = ()
    found: dict[tuple[float, bool], torch.Tensor] = field(default_factory=dict)

    def of(self, runs: Sequence[tuple[int, int]], device: torch.device) -> DeviceSteps:
        """The steps of a list of tensors on ``device``."""
        if device == self.counts.device:
            return replace(self, runs=runs)
        return DeviceSteps(self.counts.to(device, non_blocking=device.type != "cpu"), runs)

    def unbiased(self, beta: float, *, root: bool = False) -> torch.Tensor:
        """What :func:`unbiased` finds: one number, or a vector with one for each tensor."""
        if (beta, root) not in self.found:
            self.found[beta, root] = _unbiased(beta, self.counts, root=root)
        each = torch.split(self.found[beta, root], 1)
        if len(self.runs) == 1:
            return each[self.runs[0][0]].view(())
        return torch.cat(
            [each[group].expand(size) if size > 1 else each[group] for group, size in self.runs]
        )


Step = int | torch.Tensor | DeviceSteps


def unbiased(beta: float, step: Step, *, root: bool = False) -> Scalar:
    """``1 / (1 - beta ** step)``, or its ``root``.

    For a step on a device computed there, in float64, and rounded once, as a kernel rounds what the
    host has computed: so the steps are the same wherever they are counted.
    """
    if isinstance(step, DeviceSteps):
        return step.unbiased(beta, root=root)
    if isinstance(step, torch.Tensor):
        return _unbiased(beta, step.reshape(()), root=root)
    found = 1 / (1 - beta**step)
    return math.sqrt(found) if root else found


def _unbiased(beta: float, steps: torch.Tensor, *, root: bool) -> torch.Tensor:
    found: torch.Tensor = (1 - beta ** steps.double()).reciprocal()
    return (found.sqrt() if root else found).float()


def corrections(hyper: Any) -> tuple[Scalar, Scalar]:
    """The inverses of both bias corrections of a step, 1 without them."""
    if not hyper.bias_correction:
        return 1.0, 1.0
    return unbiased(hyper.beta1, hyper.step), unbiased(hyper.beta2, hyper.step)


def l2_and_decay(weight_decay: Scalar, decoupled: object) -> tuple[Scalar, Scalar]:
    """The weight decay as the two that an update has: in the gradient, and decoupled from it."""
    return (0.0, weight_decay) if decoupled else (weight_decay, 0.0)


@dataclass
class AdamNumbers:
    """The hyperparameters that Adam and LAMB have; ``adam_w_mode`` decouples the weight decay."""

    lr: Scalar
    beta1: float
    beta2: float
    eps: float
    weight_decay: Scalar
    adam_w_mode: bool
    bias_correction: bool
    step: Step


@dataclass
class Adam(AdamNumbers):
    """``eps_inside_sqrt``: add ``eps`` to the second moment instead, below the root."""

    eps_inside_sqrt: bool = False

    def scalars(self, factor: Scalar) -> AdamScalars:
        """What the update takes."""
        return scalars(self, factor)


def scalars(hyper: AdamNumbers, factor: Scalar) -> AdamScalars:
    """What the update takes for these hyperparameters."""
    return AdamScalars(
        factor, hyper.lr, hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, hyper.eps,
        *corrections(hyper), *l2_and_decay(hyper.weight_decay, hyper.adam_w_mode),
    )  # fmt: skip


def adam_(
    columns: Sequence[TensorList], hyper: Adam, options: StepOptions = DEFAULT_OPTIONS
) -> None:
    """Take one step; the states are first and second moments."""
    update, kernel = (ADAM_EPS_INSIDE, None) if hyper.eps_inside_sqrt else (ADAM, torchs)
    cpu_fused.step_or_run(update, kernel, columns, hyper, options)


def for_torch(step: Step, corrects: bool) -> torch.Tensor:
    """A step for torch's fused kernels on a CPU; without bias corrections the infinite one."""
    assert not isinstance(step, DeviceSteps)  # cpu_fused.torch_steps asks
    return cpu_fused.number(float(step) if corrects else math.inf)


def torchs(hyper: AdamNumbers) -> Callable[..., None]:
    """Torch's fused kernel for float32 columns of the CPU."""
    step = for_torch(hyper.step, hyper.bias_correction)
    fused = private.fused_adamw_ if hyper.adam_w_mode else private.fused_adam_

    def kernel(grads: _List, params: _List, exp_avgs: _List, exp_avg_sqs: _List) -> None:
        fused(
            params, grads, exp_avgs, exp_avg_sqs, [], [step] * len(params),
            lr=float(hyper.lr), beta1=hyper.beta1, beta2=hyper.beta2, eps=hyper.eps,
            weight_decay=float(hyper.weight_decay), amsgrad=False, maximize=False,
        )  # fmt: skip

    return kernel
