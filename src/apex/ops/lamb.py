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
piece is applied there: 20 ms for the 10 million weights of 293 tensors, where whole lists take 45.

Source: You et al., arXiv:1904.00962, algorithm 2; NVLAMB is NVIDIA's variant, which adapts tensors
without weight decay too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from apex.ops import _runtime
from apex.ops.adam import unbiased
from apex.ops.host import as_float32, host_can
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
    unflattened,
)
from apex.ops.norms import segment_squares
from apex.ops.storage import PLAIN, PLAINLY, How, run_stored

# Elements that are taken at once on a CPU; the scratch is as long, 2 MiB. On an AMD EPYC (32 MiB
# of L3) the 10 million weights of 293 tensors take 3 % longer with 2**18.
PIECE = 2**19
# Elements whose norm torch computes at once; it is off by 1.8e-6 at most, that of 2**24 by 7.6e-4.
NORMED = 2**18
# From so many tensors in a piece on, calls count and not passes: weights and norms are taken flat.
MANY = 16
SHORT = 1024  # elements of tensors that are taken together with their like

_Adam = Callable[..., None]


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
        and not isinstance(how.factor, torch.Tensor)
        and host_can(columns, how)
    ):
        with as_float32(columns, how, write_grads=how.extra is None) as wide:
            _on_host(wide, known, float(how.factor))
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
    codec = PLAIN.codec()
    if how.storage is not PLAIN and how.extra is not None:
        columns.append(how.extra)
        # weights are read as they are stored; none is written yet
        decode = how.storage.codec().decode
        codec = Codec(decode, codec.encode, f"storage:{how.storage.decode},rounded")
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether every element has memory of its own, unlike those of an expanded tensor."""
    if tensor.is_contiguous():
        return True
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return all(stride or size <= 1 for size, stride in pairs)


# -- torch's fused Adam on the CPU ---------------------------------------------------------------


def _on_host(columns: Sequence[Column], numbers: Lamb, factor: float) -> None:
    for alike in by_length(columns, SHORT):
        _alike_on_host(alike, numbers, factor)


def _alike_on_host(columns: Sequence[Column], numbers: Lamb, factor: float) -> None:
    grads, params = columns[0], columns[1]
    sizes = [*map(torch.Tensor.numel, params)]
    adam = _adam(numbers)
    scratch = torch.empty(min(PIECE, sum(sizes)))
    long: dict[int, list[tuple[float, float]]] = {}  # norms of the pieces of a long tensor
    for where, part in batches(columns, PIECE):
        if len(where) > MANY:
            _many_on_host(part, numbers, factor, adam)
            continue
        norms = _few_terms(part, numbers, factor, adam, scratch)
        if sizes[where[0]] > PIECE:
            long.setdefault(where[0], []).extend(norms)
            continue
        for grad, param, both in zip(part[0], part[1], norms, strict=True):
            param.add_(grad, alpha=-numbers.rate(*both))
    for number, norms in long.items():
        weight, size = map(_joined, zip(*norms, strict=True))
        params[number].add_(grads[number], alpha=-numbers.rate(weight, size))


def _few_terms(
    part: Sequence[list[torch.Tensor]],
    numbers: Lamb,
    factor: float,
    adam: _Adam,
    scratch: torch.Tensor,
) -> list[tuple[float, float]]:
    """Update the moments and put the terms into the gradients.

    Returns:
        The norms of weights and terms; ones where there are no trust ratios.
    """
    grads, params, *moments = part
    decay = float(numbers.weight_decay)
    if decay and not numbers.adam_w_mode:
        torch._foreach_mul_(grads, factor)
        torch._foreach_add_(grads, params, alpha=decay)
        factor = 1.0
    terms = unflattened(scratch[: sum(map(torch.Tensor.numel, params))].zero_(), params)
    adam(terms, grads, *moments, factor)
    # Whoever reads the weights first waits for memory, a norm least: 1.5 ms of 17 for 10 million.
    weights = _norms(params) if numbers.adapts else []
    if decay and numbers.adam_w_mode:  # not 0 times a weight of inf or nan
        for term, param, grad in zip(terms, params, grads, strict=True):
            torch.add(term, param, alpha=decay, out=grad)
    else:
        torch._foreach_copy_(grads, terms)
    if not numbers.adapts:
        return [(1.0, 1.0)] * len(grads)
    return list(zip(weights, _norms(grads), strict=True))


def _norms(column: list[torch.Tensor]) -> list[float]:
    """The norm of each of a few tensors."""
    if all(x.numel() <= NORMED for x in column):
        return [norm.item() for norm in torch._foreach_norm(column)]
    pieces = [torch.split(x.view(-1), NORMED) for x in column]
    return [_joined(x.item() for x in torch._foreach_norm(some)) for some in pieces]


def _joined(norms: Iterable[float]) -> float:
    return math.sqrt(sum(x * x for x in norms))


def _many_on_host(
    part: Sequence[list[torch.Tensor]], numbers: Lamb, factor: float, adam: _Adam
) -> None:
    """Step many short tensors, joined wherever that saves calls."""
    grads, params, *moments = part
    total, weight = flattened(grads).mul_(factor), flattened(params)
    decay = float(numbers.weight_decay)
    if decay and not numbers.adam_w_mode:
        total.add_(weight, alpha=decay)
    # not 0 times a weight of inf or nan
    term = weight * decay if decay and numbers.adam_w_mode else torch.zeros_like(weight)
    terms, totals = unflattened(term, grads), unflattened(total, grads)
    adam(terms, totals, *moments, 1.0)
    updated = total  # which is of no more use
    if numbers.adapts:
        lengths = torch.tensor([*map(torch.Tensor.numel, grads)])
        rates = numbers.rates(*(segment_squares(x, lengths).sqrt() for x in (weight, term)))
        torch.addcmul(weight, term, rates.float().repeat_interleave(lengths), value=-1, out=updated)
    else:
        torch.add(weight, term, alpha=-float(numbers.lr), out=updated)
    torch._foreach_copy_(params, totals)
    torch._foreach_copy_(grads, terms)


def _adam(numbers: Lamb) -> _Adam:
    """Make a function that updates the moments and adds Adam's update to the terms."""
    step = torch.tensor(float(numbers.step) if numbers.bias_correction else math.inf)

    def adam(terms: Column, grads: Column, avgs: Column, squares: Column, factor: float) -> None:
        torch._fused_adam_(
            list(terms),
            list(grads),
            list(avgs),
            list(squares),
            [],
            [step] * len(terms),
            lr=-1.0,
            beta1=numbers.beta1,
            beta2=numbers.beta2,
            weight_decay=0.0,
            eps=numbers.eps,
            amsgrad=False,
            maximize=False,
            # torch divides by it; the inverse of 0 is to be inf
            grad_scale=None if factor == 1.0 else torch.tensor(factor).reciprocal(),
        )

    return adam
