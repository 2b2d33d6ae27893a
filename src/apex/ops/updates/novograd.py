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
yet: the first becomes the gradient's own.

Norms are computed and kept where the tensors are; nothing waits for them. Where a rank holds a part
of a tensor, its caller adds up the squares, or finds the largest magnitude, before the update
(:func:`novograd_stages`).

Source: Ginsburg et al., arXiv:1905.11286, algorithm 1; the decoupled form and the bias corrections
are those of NVIDIA Apex.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from apex._compat import private
from apex.ops.lists.multi_tensor import Update, Values
from apex.ops.lists.stages import Kind, Stages, Sums, finish
from apex.ops.lists.storage import DEFAULT_OPTIONS, StepOptions, run_stored
from apex.ops.lists.tensor_lists import Scalar, TensorList, as_vector
from apex.ops.lists.tensor_norms import max_norms, square_sums
from apex.ops.updates import cpu_fused
from apex.ops.updates.adam import Step, corrections, l2_and_decay, unbiased

UNSET = -1.0

_List = list[torch.Tensor]


# What the update takes; ``scale`` is each tensor's.
NovoGradScalars = namedtuple(
    "NovoGradScalars",
    "factor lr beta1 grad_share unbias1 l2 decay scale",
)


def reference(values: Values, s: NovoGradScalars) -> Values:
    """Compute the definition with weight decay decoupled from the moment."""
    grad, param, exp_avg = values[:3]
    grad = grad * s.factor
    exp_avg = s.beta1 * exp_avg + s.grad_share * (grad + s.l2 * param)
    update = (exp_avg * s.unbias1) / s.scale + s.decay * param
    return param - s.lr * update, exp_avg, grad


def reference_inside(values: Values, s: NovoGradScalars) -> Values:
    """Compute the definition with weight decay in the moment."""
    grad, param, exp_avg = values[:3]
    grad = grad * s.factor
    exp_avg = s.beta1 * exp_avg + s.grad_share * (grad / s.scale + s.l2 * param)
    update = exp_avg * s.unbias1 + s.decay * param
    return param - s.lr * update, exp_avg, grad


NOVOGRAD = Update(reference, "novograd:novograd", NovoGradScalars)
INSIDE = Update(reference_inside, "novograd:novograd_inside", NovoGradScalars)


class NovoGrad(NamedTuple):
    """The hyperparameters.

    Attributes:
        reg_inside_moment: Whether the weight decay enters the moment, or is decoupled from it.
        grad_averaging: Whether a gradient enters the moment by ``1 - beta1`` or whole.
        norm_type: 2, or 0 for the largest magnitude.
        init_zero: Whether the first norm is blended with 0, instead of being the gradient's own.
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
    step: Step
    init_zero: bool = False

    def scalars(self, factor: Scalar, scales: torch.Tensor) -> NovoGradScalars:
        """What the update takes."""
        return NovoGradScalars(
            factor, self.lr, self.beta1, 1 - self.beta1 if self.grad_averaging else 1.0,
            corrections(self)[0], *l2_and_decay(self.weight_decay, not self.reg_inside_moment),
            scales,
        )  # fmt: skip

    def blended(self, norms: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        """The new norms, from those so far and the gradients'."""
        norms = torch.where(norms < 0, 0.0 if self.init_zero else current, norms)
        rest = 1 - self.beta2
        if self.norm_type == 0:
            return self.beta2 * norms + rest * current
        return torch.sqrt(self.beta2 * norms * norms + rest * current * current)

    def scales(self, norms: torch.Tensor) -> torch.Tensor:
        """What the norms make of gradient or moment: they are divided by it."""
        root = unbiased(self.beta2, self.step, root=True) if self.bias_correction else 1.0
        return norms * root + self.eps


def kind_of(norm_type: int) -> Kind:
    """What the first stage yields of each gradient."""
    return Kind(1, norm_type == 0)


@torch.no_grad()
def novograd_(
    columns: Sequence[TensorList], hyper: NovoGrad, options: StepOptions = DEFAULT_OPTIONS
) -> None:
    """Take one step; the states are moments, and norms: float32, one number for each tensor."""
    finish(novograd_stages(columns, hyper, options))


def novograd_stages(
    columns: Sequence[TensorList], hyper: NovoGrad, options: StepOptions = DEFAULT_OPTIONS
) -> Stages:
    """Take the same step on parts of tensors, without autograd around it.

    Yields:
        The sum of the squares of each gradient, or its largest magnitude: :func:`kind_of`. It is to
        be sent that of the whole gradient.
    """
    *columns, column = columns
    norms = as_vector(column)
    measure = max_norms if hyper.norm_type == 0 else square_sums
    sums = measure(columns[0], factor=options.factor)
    current = (yield Sums(sums.view(1, -1), *kind_of(hyper.norm_type)[1:]))[0]
    new = hyper.blended(norms, current if hyper.norm_type == 0 else current.sqrt())
    if options.noop is not None:
        new = torch.where(options.noop.reshape(()) != 0, norms, new)
    scales = hyper.scales(new)
    if norms.data_ptr() == column[0].data_ptr():
        norms.copy_(new)
    else:
        private.foreach_copy_(list(column), new.unbind())
    if cpu_fused.torch_steps(columns, options, hyper.lr, hyper.weight_decay, hyper.step):
        cpu_fused.step_(_by_foreach(hyper), [*columns, scales.unbind()], options)
        return
    update = INSIDE if hyper.reg_inside_moment else NOVOGRAD
    run_stored(update, columns, hyper.scalars(options.factor, scales), options)


def _by_foreach(hyper: NovoGrad) -> Callable[..., None]:
    """Torch's foreach functions for float32 columns of the CPU, the last of which are the scales.

    1e7 elements of 300 tensors take 17 ms, by the definition 70 (AMD EPYC, one thread).
    """
    s = hyper.scalars(1.0, torch.empty(0, device="cpu", dtype=torch.float32))
    lr, decay, share = float(s.lr), float(hyper.weight_decay), float(s.grad_share)
    shrunk, beta1 = cpu_fused.number(1 - lr * decay), cpu_fused.number(hyper.beta1)
    moved = -lr * float(s.unbias1)

    def kernel(*columns: _List) -> None:
        for grads, params, moments, scales in cpu_fused.batches(columns):
            if hyper.reg_inside_moment:
                grads = list(private.foreach_div(grads, scales))
                if decay:
                    private.foreach_add_(grads, params, alpha=decay)
            elif decay:
                private.foreach_mul_(params, shrunk)
            private.foreach_mul_(moments, beta1)  # not lerp, which makes nan of a moment of inf
            private.foreach_add_(moments, grads, alpha=share)
            if hyper.reg_inside_moment:
                private.foreach_add_(params, moments, alpha=moved)
            else:
                private.foreach_addcdiv_(params, moments, scales, value=moved)

    return kernel
