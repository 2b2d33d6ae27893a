"""LAMB over lists of tensors: Adam's term, scaled by the size of each tensor.

    g = factor * grad + l2 * param
    exp_avg    = beta1 * exp_avg    + share * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
    term       = (exp_avg / c1) / (sqrt(exp_avg_sq / c2) + eps) + decay * param
    ratio      = |param| / |term|     where both are above 0, else 1
    param -= lr * ratio * term

with the bias corrections ``c = 1 - beta ** step``, ``share`` either ``1 - beta1`` or 1, and the
norms over one tensor. ``l2`` or ``decay`` is the weight decay. Without weight decay the ratio is 1,
unless NVLAMB is asked for. ``factor`` is what the gradient is multiplied by on the way in:
1 / loss scale, times the coefficient that clips the norm of all gradients.

Two launches: the first writes moments and term and sums the squares, the second applies the ratio;
neither waits for the host. The term is written **into the gradient**, as in the original, which
saves a column of scratch. A 16-bit gradient would round it, so there the term has float32 scratch
of its own and the gradient gets the rounded one beside it.

On a CPU torch's fused Adam computes the term, as if it stepped from 0 with the learning rate -1.
Tensors go by pieces that stay in the cache, and the ratio of a tensor that is no longer than a
piece is applied there: 22 ms for the 10 million weights of 293 tensors, where whole lists take 45.

Source: You et al., arXiv:1904.00962, algorithm 2; NVLAMB is NVIDIA's variant, which adapts tensors
without weight decay too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from apex.ops import _runtime
from apex.ops.adam import unbiased
from apex.ops.multi_tensor import (
    Codec,
    Column,
    Scalar,
    Update,
    Values,
    batches,
    by_length,
    flattened,
    run,
    torch_can,
    unflattened,
)
from apex.ops.norms import small_squares
from apex.ops.storage import PLAIN, PLAINLY, How, run_stored

# Elements that are taken at once on a CPU; the scratch is as long, 1 MiB. Measured on an AMD EPYC
# with 1 MiB of L2 a core. torch's norm of so many is off by 1.8e-6 at most; of 2**24 by 7.6e-4.
PIECE = 2**18
# From so many tensors in a piece on, calls count and not passes: weights and norms are taken flat.
MANY = 16
SHORT = 1024  # elements of tensors that are taken together with their like


def _term(values: Values, scalars: Sequence[Any], own: Sequence[Any]) -> Values:
    grad, param, exp_avg, exp_avg_sq = values[:4]
    factor, beta1, share, beta2, rest2, eps, unbias1, unbias2, l2, decay = scalars[:10]
    total = grad * factor + l2 * param
    exp_avg = beta1 * exp_avg + share * total
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * total * total
    root = torch.sqrt(exp_avg_sq * unbias2) + eps
    term = (exp_avg * unbias1) / root + decay * param
    return term, exp_avg, exp_avg_sq, param * param, term * term


def _apply(values: Values, scalars: Sequence[Any], own: Sequence[Any]) -> Values:
    return values[1] - own[0] * values[0], values[0]


TERM = Update(_term, "lamb:lamb_term")
APPLY = Update(_apply, "lamb:lamb_apply")


@dataclass(frozen=True)
class Lamb:
    """The numbers of one step.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the corrected root.
        weight_decay: L2 penalty, or decoupled decay with ``adam_w_mode``.
        adam_w_mode: Which of the two.
        bias_correction: Whether the moments are corrected for their start at 0.
        grad_averaging: Whether a gradient enters the moment by ``1 - beta1`` or whole.
        use_nvlamb: Whether tensors without weight decay are adapted too.
        step: Which step this is, from 1; a tensor is read on its device.
    """

    lr: Scalar
    beta1: float
    beta2: float
    eps: float
    weight_decay: Scalar
    adam_w_mode: bool
    bias_correction: bool
    grad_averaging: bool
    use_nvlamb: bool
    step: int | torch.Tensor

    def scalars(self, factor: Scalar) -> tuple[Scalar, ...]:
        """What the first half takes."""
        unbias1: Scalar = 1.0
        unbias2: Scalar = 1.0
        if self.bias_correction:
            unbias1, unbias2 = unbiased(self.beta1, self.step), unbiased(self.beta2, self.step)
        l2, decay = (0.0, self.weight_decay) if self.adam_w_mode else (self.weight_decay, 0.0)
        share = 1 - self.beta1 if self.grad_averaging else 1.0
        return (
            factor,
            self.beta1,
            share,
            self.beta2,
            1 - self.beta2,
            self.eps,
            unbias1,
            unbias2,
            l2,
            decay,
        )

    @property
    def adapts(self) -> bool:
        """Whether there are trust ratios; a weight decay on a device may turn out to be 0."""
        return self.use_nvlamb or isinstance(self.weight_decay, torch.Tensor) or self.has_decay

    @property
    def has_decay(self) -> bool:
        """Whether the weight decay is known not to be 0."""
        return not isinstance(self.weight_decay, torch.Tensor) and self.weight_decay != 0

    def rates(self, params: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
        """Learning rate times trust ratio, from the norms of weights and terms."""
        trusted = (params != 0) & (terms != 0)
        if not self.use_nvlamb and isinstance(self.weight_decay, torch.Tensor):
            trusted = trusted & (self.weight_decay != 0)
        return self.lr * torch.where(trusted, params / terms, 1.0)

    def rate(self, weight: float, term: float) -> float:
        """As :meth:`rates`, for numbers of the host where :attr:`adapts`."""
        return float(self.lr) * (weight / term if weight and term else 1.0)

    def hosted(self) -> Lamb | None:
        """These numbers without tensors, where that does not wait for a device."""
        numbers = (self.lr, self.weight_decay, self.step)
        if any(isinstance(x, torch.Tensor) and _runtime.waits(x.device) for x in numbers):
            return None
        lr, weight_decay = float(self.lr), float(self.weight_decay)
        return replace(self, lr=lr, weight_decay=weight_decay, step=int(self.step))


@torch.no_grad()
def lamb_(columns: Sequence[Column], numbers: Lamb, how: How = PLAINLY) -> None:
    """Take one step, in place; gradients are left holding the term.

    16-bit gradients of weights that have 16-bit copies, and gradients whose elements share memory,
    are left as they are.

    Args:
        columns: Gradients, weights, first moments, second moments; each of one dtype, all on one
            device and of the same sizes.
        numbers: Of the step.
        how: Scaling, skipping and storage; ``write_grads`` is of no effect.
    """
    if not columns[0]:
        return
    known = numbers.hosted()
    if (
        known is not None
        and known.grad_averaging
        and how.noop is None
        and how.meter is None
        and how.storage is PLAIN
        and not isinstance(how.factor, torch.Tensor)
        and torch_can(columns)
    ):
        _on_host(columns, known, how)
        return
    grads, params = columns[0], columns[1]
    terms, stores = grads, [(0, 0), (2, 1), (3, 2)]
    columns = list(columns)
    is_wide = grads[0].dtype in (torch.float32, torch.float64)
    writable = all(map(_is_writable, grads))
    if not is_wide or not writable:
        terms = [torch.empty_like(p, dtype=_wide(p.dtype)) for p in params]
        if not writable or how.extra is not None:
            stores.pop(0)
        stores.append((4, 0))
        columns.append(terms)
    codec = how.storage.codec
    if how.storage is not PLAIN and how.extra is not None:
        columns.append(how.extra)
        module, names = codec.kernel.split(":")
        # weights are read as they are stored; none is written yet
        codec = Codec(codec.decode, _unstored, f"{module}:{names.split(',')[0]},rounded")
    elif how.storage is not PLAIN:
        codec = PLAIN.codec
    sums = run(
        TERM,
        columns,
        tuple(stores),
        numbers.scalars(how.factor),
        noop=how.noop,
        sums=(3, 4) if numbers.adapts else (),
        codec=codec,
    )
    if sums is None:
        rates = numbers.lr * torch.ones(len(params), device=params[0].device)
    else:
        rates = numbers.rates(*sums.sqrt().unbind())
    second = replace(how, factor=1.0, write_grads=False)
    run_stored(APPLY, [terms, params], (), second, own=(rates,))


def _unstored(raw: Values, values: Values, scalars: Sequence[Any], new: Values) -> Values:
    return new


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether every element has memory of its own, unlike those of an expanded tensor."""
    if tensor.is_contiguous():
        return True
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return all(stride or size <= 1 for size, stride in pairs)


# -- torch's fused Adam on the CPU ---------------------------------------------------------------


def _on_host(columns: Sequence[Column], numbers: Lamb, how: How) -> None:
    for alike in by_length(columns, SHORT):
        _alike_on_host(alike, numbers, how)
    if how.extra is not None:
        torch._foreach_copy_(list(how.extra), list(columns[1]))


def _alike_on_host(columns: Sequence[Column], numbers: Lamb, how: How) -> None:
    grads, params = columns[0], columns[1]
    sizes = [*map(torch.Tensor.numel, params)]
    step = torch.tensor(float(numbers.step) if numbers.bias_correction else math.inf)
    # torch divides by it; the inverse of 0 is to be inf
    divisor = None if how.factor == 1 else torch.tensor(how.factor).reciprocal()
    scratch = torch.empty(min(PIECE, sum(sizes)))
    long: dict[int, list[tuple[float, float]]] = {}  # norms of the pieces of a long tensor
    for where, part in batches(columns, PIECE):
        _host_terms(part, numbers, step, divisor, scratch)
        norms = [(1.0, 1.0)] * len(where)
        if numbers.adapts:
            norms = list(zip(_norms(part[1]), _norms(part[0]), strict=True))
        if sizes[where[0]] > PIECE:
            long.setdefault(where[0], []).extend(norms)
            continue
        for grad, param, both in zip(part[0], part[1], norms, strict=True):
            param.add_(grad, alpha=-numbers.rate(*both))
    for number, norms in long.items():
        weight, size = (math.sqrt(sum(x * x for x in some)) for some in zip(*norms, strict=True))
        params[number].add_(grads[number], alpha=-numbers.rate(weight, size))


def _norms(column: Column) -> list[float]:
    """The norm of each tensor, none of them longer than a piece."""
    if len(column) > MANY:
        return small_squares(column).sqrt().tolist()
    return [norm.item() for norm in torch._foreach_norm(list(column))]


def _host_terms(
    part: Sequence[list[torch.Tensor]],
    numbers: Lamb,
    step: torch.Tensor,
    divisor: torch.Tensor | None,
    scratch: torch.Tensor,
) -> None:
    """Update the moments and put the terms into the gradients."""
    grads, params, exp_avgs, exp_avg_sqs = part
    decay = float(numbers.weight_decay)
    if decay and not numbers.adam_w_mode:
        if divisor is not None:
            torch._foreach_div_(grads, divisor)
            divisor = None
        torch._foreach_add_(grads, params, alpha=decay)
        decay = 0.0
    flat = scratch[: sum(map(torch.Tensor.numel, params))].zero_()
    terms = unflattened(flat, params)
    torch._fused_adam_(
        terms,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(terms),
        lr=-1.0,
        beta1=numbers.beta1,
        beta2=numbers.beta2,
        weight_decay=0.0,
        eps=numbers.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
    )
    if decay and len(terms) <= MANY:
        for term, param, grad in zip(terms, params, grads, strict=True):
            torch.add(term, param, alpha=decay, out=grad)
        return
    if decay:  # not 0 times a weight of inf or nan
        flat.add_(flattened(params), alpha=decay)
    torch._foreach_copy_(grads, terms)
