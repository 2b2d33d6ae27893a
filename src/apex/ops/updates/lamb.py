"""LAMB over lists of tensors: Adam's term, scaled by the size of each tensor.

    g = factor * grad + l2 * param
    exp_avg    = beta1 * exp_avg    + share * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
    term       = (exp_avg / c1) / (sqrt(exp_avg_sq / c2) + eps) + decay * param
    ratio      = |param| / |term|     where both are above 0, else 1
    param -= lr * ratio * term

with the bias corrections ``c = 1 - beta ** step``, ``share`` either ``1 - beta1`` or 1, and the
norms over one tensor. Without weight decay the ratio is 1, unless NVLAMB is asked for. Where a rank
holds a part of a tensor, its caller adds up the squares between the launches (:func:`lamb_stages`).

Two launches: the first writes moments and term and sums the squares, the second applies the ratio;
neither waits for the host. The term is written **into the gradient**, as in the original, which
saves a column of scratch. A 16-bit gradient would round it, so there the term has float32 scratch
of its own and the gradient gets the rounded one beside it. A caller whose gradients may share
memory passes copies of them, see :mod:`apex.ops.lists.overlaps`.

Source: You et al., arXiv:1904.00962, algorithm 2; NVLAMB is NVIDIA's variant, which adapts tensors
without weight decay too.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from apex._compat import private
from apex.ops import _runtime
from apex.ops.lists.multi_tensor import Codec, Update, Values, run
from apex.ops.lists.stages import Kind, Stages, Sums, finish
from apex.ops.lists.storage import DEFAULT_OPTIONS, PLAIN, StepOptions, run_stored
from apex.ops.lists.tensor_lists import Scalar, TensorList, scratch
from apex.ops.lists.tensor_norms import square_sums
from apex.ops.updates import cpu_fused
from apex.ops.updates.adam import AdamNumbers, corrections, for_torch, l2_and_decay

# What the first launch takes; "unbias" are the inverses of the bias corrections.
TermScalars = namedtuple(
    "TermScalars", "factor beta1 grad_share beta2 one_minus_beta2 eps unbias1 unbias2 l2 decay"
)
# What the first stage yields of each tensor: the squares of its weights and of its term.
SQUARES = Kind(2)
# Learning rate times trust ratio of each tensor.
ApplyScalars = namedtuple("ApplyScalars", "rate")


def _term(values: Values, s: TermScalars) -> Values:
    grad, param, exp_avg, exp_avg_sq = values[:4]
    total = grad * s.factor + s.l2 * param
    exp_avg = s.beta1 * exp_avg + s.grad_share * total
    exp_avg_sq = s.beta2 * exp_avg_sq + s.one_minus_beta2 * total * total
    root = torch.sqrt(exp_avg_sq * s.unbias2) + s.eps
    term = (exp_avg * s.unbias1) / root + s.decay * param
    return term, exp_avg, exp_avg_sq, param * param, term * term


def _apply(values: Values, s: ApplyScalars) -> Values:
    return values[1] - s.rate * values[0], values[0]


TERM = Update(_term, "lamb:lamb_term", TermScalars)
APPLY = Update(_apply, "lamb:lamb_apply", ApplyScalars)


@dataclass
class Lamb(AdamNumbers):
    """The hyperparameters; ``use_nvlamb`` adapts tensors without weight decay too."""

    grad_averaging: bool
    use_nvlamb: bool

    def scalars(self, factor: Scalar) -> TermScalars:
        """What the first launch takes."""
        share = 1 - self.beta1 if self.grad_averaging else 1.0
        return TermScalars(
            factor, self.beta1, share, self.beta2, 1 - self.beta2, self.eps,
            *corrections(self), *l2_and_decay(self.weight_decay, self.adam_w_mode),
        )  # fmt: skip

    @property
    def adapts(self) -> bool:
        """Whether there are trust ratios; a weight decay on a device may turn out to be 0."""
        known_to_be_0 = not isinstance(self.weight_decay, torch.Tensor) and self.weight_decay == 0
        return self.use_nvlamb or not known_to_be_0

    def rates(self, params: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
        """Learning rate times trust ratio, from the norms of weights and terms."""
        return trusted_rates(params, terms, self.lr, self.use_nvlamb or self.weight_decay)


def trusted_rates(
    params: torch.Tensor, terms: torch.Tensor, lr: Scalar, adapts: Scalar
) -> torch.Tensor:
    """Learning rate times trust ratio for each tensor.

    Args:
        params: Norms of the weights.
        terms: Norms of the terms.
        lr: Learning rate.
        adapts: Not 0 where there are trust ratios; a tensor is read on its device.
    """
    if not isinstance(adapts, torch.Tensor) and not adapts:
        return lr * torch.ones_like(params)
    trusted = params.logical_and(terms)
    if isinstance(adapts, torch.Tensor):
        trusted = trusted & (adapts != 0)
    return lr * torch.where(trusted, params / terms, 1.0)


@torch.no_grad()
def lamb_(
    columns: Sequence[TensorList], hyper: Lamb, options: StepOptions = DEFAULT_OPTIONS
) -> None:
    """Take one step; the states are first and second moments. Gradients are left holding the term.

    16-bit gradients of weights that have 16-bit copies are left as they are.
    ``options.write_grads`` is of no effect.
    """
    if columns[0]:
        finish(lamb_stages(columns, hyper, options))


def lamb_stages(
    columns: Sequence[TensorList], hyper: Lamb, options: StepOptions = DEFAULT_OPTIONS
) -> Stages:
    """Take the same step on parts of tensors, without autograd around it.

    Yields:
        The sums of the squares of weights and terms, :data:`SQUARES`, where ``hyper.adapts``. It is
        to be sent those of the whole tensors.
    """
    grads, params = columns[0], columns[1]
    known = (hyper.lr, hyper.weight_decay, hyper.step)
    if hyper.grad_averaging and cpu_fused.torch_steps(columns, options, *known):
        if options.noop is None or not options.noop.item():
            yield from _stages_on_cpu(columns, hyper, options)
        return
    terms, stores = grads, [(0, 0), (2, 1), (3, 2)]
    columns = list(columns)
    is_wide = grads[0].dtype in (torch.float32, torch.float64)
    if not is_wide:
        wide = torch.promote_types(params[0].dtype, torch.float32)
        one_launch = options.dense and not options.quantized and _runtime.can_fuse(params[0].device)
        if one_launch and wide == torch.float32:
            terms = scratch(grads)
        else:
            terms = [torch.empty_like(p, dtype=wide) for p in params]
        if options.extra is not None:
            stores.pop(0)
        stores.append((4, 0))
        columns.append(terms)
    codec = PLAIN.codec(options.quantized, options.dither)
    if options.storage is not PLAIN and options.extra is not None:
        columns.append(options.extra)
        # weights are read as they are stored; none is written yet
        decode = options.storage.codec().decode
        codec = Codec(
            decode, codec.encode, f"storage:{options.storage.decode},rounded", options.quantized,
            options.dither,
        )  # fmt: skip
    sums = run(
        TERM,
        columns,
        tuple(stores),
        hyper.scalars(options.factor),
        noop=options.noop,
        sums=(3, 4) if hyper.adapts else (),
        codec=codec,
        dense=options.dense,
        also=[params] if options.extra is None else [params, options.extra],
    )
    if sums is None:
        rates: Scalar = hyper.lr
    else:
        whole = yield Sums(sums)
        rates = hyper.rates(*whole.sqrt().unbind())
    second = options._replace(factor=1.0, write_grads=False, quantized=(), dither=None)
    run_stored(APPLY, [terms, params], ApplyScalars(rates), second, told=True)


# -- torch's fused Adam on a CPU -----------------------------------------------------------------


def _stages_on_cpu(columns: Sequence[TensorList], hyper: Lamb, options: StepOptions) -> Stages:
    """Step by torch's fused Adam: from 0, with the learning rate -1, its weight is the term.

    By pieces that stay in the cache, the 10 million weights of 293 tensors take 20 ms where whole
    lists take 45 (AMD EPYC, one thread).
    """
    wide = cpu_fused.as_float32(columns, options)
    factor, decay = float(options.factor), float(hyper.weight_decay)
    step = for_torch(hyper.step, hyper.bias_correction)
    scale, shrink = cpu_fused.number(factor), cpu_fused.number(decay)
    for grads, params, exp_avgs, exp_avg_sqs in cpu_fused.batches(wide):
        if factor != 1.0:
            private.foreach_mul_(grads, scale)
        if decay and not hyper.adam_w_mode:
            private.foreach_add_(grads, params, alpha=decay)
        if decay and hyper.adam_w_mode:  # not 0 times a weight of inf or nan
            terms = list(private.foreach_mul(params, shrink))
        else:
            terms = [torch.zeros_like(param) for param in params]
        private.fused_adam_(
            terms, grads, exp_avgs, exp_avg_sqs, [], [step] * len(terms),
            lr=-1.0, beta1=hyper.beta1, beta2=hyper.beta2, weight_decay=0.0, eps=hyper.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        private.foreach_copy_(grads, terms)
    if not hyper.adapts:
        private.foreach_add_(wide[1], wide[0], alpha=-float(hyper.lr))
    else:
        whole = yield Sums(square_sums([*wide[1], *wide[0]]).view(2, -1))
        rates = hyper.rates(*whole.sqrt().unbind())
        private.foreach_addcmul_(wide[1], wide[0], rates.neg().unbind())
    cpu_fused.store_(columns, wide, options, write_grads=options.extra is None)
