"""What rows of a linear layer's outputs give, which are never all in memory.

    z_j      = softcap * tanh((x @ weight_j + bias_j) / softcap) / temperature
    lse      = log(sum_j exp(z_j))          p_j = exp(z_j - lse)
    log_prob = z_target - lse
    entropy  = -sum_j p_j log(p_j)
    mean     = mean_j z_j

One function makes these four numbers of each row, in pieces of rows, and its backward makes the
logits once more. Losses are formulas of the four, which autograd differentiates:
cross-entropy is ``-log_prob``, smoothing adds ``lse - mean``, and the z-loss ``lse ** 2``.

The gradient of a row is, with ``d`` for the gradients of the four,

    dz_j = p_j (d_lse - d_log_prob - d_entropy (log(p_j) + entropy)) + d_mean / classes
           + d_log_prob [j == target]

where ``1 - p_target`` is the sum of the other probabilities: near probability 1 a difference would
cancel. Sources: softcap, Gemma 2 (arXiv:2408.00118, section 2); z-loss, PaLM (arXiv:2204.02311,
section 5).

Products and pieces are those of :mod:`apex.ops.losses.linear_cross_entropy`; a piece of logits is
looked at in float32 (float64 for float64), ``PIECE`` numbers at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from apex.ops import _runtime
from apex.ops._check import ArgumentError
from apex.ops._dtypes import Optional, wide
from apex.ops.layers import dense
from apex.ops.losses import cross_entropy as rows_op
from apex.ops.losses._pieces import pieces


class RowOptions(NamedTuple):
    """How logits become ``z``, and how many rows at a time.

    Attributes:
        ignore_index: Target of rows whose numbers and gradients are 0.
        softcap: Bound of the logits, or ``None``.
        temperature: What they are divided by.
        chunk_size: Rows of a piece, or 0 for the usual number.
        compact: Whether pieces are those of ``acc_policy="compact"``.
        acc_dtype: In what the gradient of the weight adds up; ``None`` for float32.
        entropy: Whether the entropy is wanted.
    """

    ignore_index: int = -100
    softcap: float | None = None
    temperature: float = 1.0
    chunk_size: int = 0
    compact: bool = False
    acc_dtype: torch.dtype | None = None
    entropy: bool = True


class LogProbs(NamedTuple):
    """Log-probabilities of targets and entropies of rows, float32 (float64 for float64 input)."""

    log_probs: torch.Tensor
    entropy: torch.Tensor


def check_options(
    name: str, softcap: float | None, temperature: float, z_loss: float = 0.0
) -> None:
    """Raise ``ArgumentError`` for an option that is out of its range."""
    said = None
    if softcap is not None and not 0.0 < softcap < math.inf:
        said = f"softcap is {softcap}; pass a number above 0, or None."
    elif not 0.0 < temperature < math.inf:
        said = f"temperature is {temperature}; pass a number above 0."
    elif not 0.0 <= z_loss < math.inf:
        said = f"z_loss is {z_loss}; pass 0 or more."
    if said:
        raise ArgumentError(f"{name}: {said}")


def _shaped(logits: torch.Tensor, options: RowOptions) -> tuple[torch.Tensor, Optional]:
    """``z`` in float32 or wider, and the derivative of the softcap, unless that is 1."""
    raw = logits.to(wide(logits))
    if options.softcap is None:
        return raw / options.temperature, None
    bounded = torch.tanh(raw / options.softcap)
    return bounded * (options.softcap / options.temperature), 1.0 - bounded.square()


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    targets: torch.Tensor,
    options: RowOptions,
) -> tuple[torch.Tensor, ...]:
    """Compute the definition, with all logits in memory."""
    z, _ = _shaped(F.linear(x, weight, bias), options)
    skip = targets == options.ignore_index
    logs = F.log_softmax(z, 1)
    entropy = torch.special.entr(logs.exp()).sum(1)
    log_probs = logs.gather(1, targets.masked_fill(skip, 0)[:, None])[:, 0]
    rows = (log_probs, z.logsumexp(1), entropy, z.mean(1))
    return tuple(row.masked_fill(skip, 0.0) for row in rows)


def _slices(x: torch.Tensor, weight: torch.Tensor, bias: Optional, options: RowOptions) -> Iterator[
    tuple[slice, torch.Tensor, list[tuple[slice, torch.Tensor]]]
]:  # fmt: skip
    """Pieces: their rows and logits, and the slices of these that are looked at in float32."""
    many = rows_op.PIECE if x.is_cpu else rows_op.DEVICE_PIECE
    height = max(1, many // len(weight))
    for rows, logits in pieces(x, weight, bias, options.chunk_size, options.compact):
        starts = range(rows.start, rows.stop, height)
        at = [slice(start, min(start + height, rows.stop)) for start in starts]
        yield rows, logits, list(zip(at, torch.split(logits, height), strict=True))


class _Rows(torch.autograd.Function):
    """The four numbers of each row."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        """Compute them piece by piece; keep the inputs alone."""
        x, weight, bias, targets, options = args
        ctx.save_for_backward(x, weight, bias, targets)
        ctx.options = options
        ctx.set_materialize_grads(value=False)
        skip = targets == options.ignore_index
        index = targets.masked_fill(skip, 0)[:, None]
        rows = x.new_zeros((4, len(x)), dtype=wide(x))
        for _, _, slices in _slices(x, weight, bias, options):
            for at, logits in slices:
                z, _ = _shaped(logits, options)
                rows[3, at] = z.mean(1)
                rows[1, at] = z.logsumexp(1)
                logs = F.log_softmax(z, 1)
                rows[0, at] = logs.gather(1, index[at])[:, 0]
                if options.entropy:
                    rows[2, at] = torch.special.entr(logs.exp_()).sum(1)
        return tuple(rows.masked_fill_(skip, 0.0).clone().unbind())

    @staticmethod
    def backward(ctx: Any, *grads: Optional) -> Any:
        """The gradients of input, weight and bias."""
        x, weight, bias, targets = ctx.saved_tensors
        options, wanted = ctx.options, ctx.needs_input_grad[:3]
        again = torch.is_grad_enabled()
        if again or _any_batched(grads):  # gradients of gradients, vmap: of the definition
            with torch.enable_grad():
                numbers = zip(reference(x, weight, bias, targets, options), grads, strict=True)
                some = [(number, d) for number, d in numbers if d is not None]
            inputs = [one for one, want in zip((x, weight, bias), wanted, strict=True) if want]
            ends, weights = zip(*some, strict=True)
            found = iter(torch.autograd.grad(ends, inputs, weights, create_graph=again))
            return (*(next(found) if want else None for want in wanted), None, None)
        dx = torch.empty_like(x) if wanted[0] else None
        total = options.acc_dtype or wide(weight)
        dweight = torch.zeros_like(weight, dtype=total) if wanted[1] else None
        dbias = torch.zeros_like(bias, dtype=wide(weight)) if wanted[2] else None
        for rows, slope, slices in _slices(x, weight, bias, options):
            for at, logits in slices:
                logits.copy_(_slope(logits, at, targets, grads, options))
            if dx is not None:
                torch.mm(slope, weight, out=dx[rows])
            if dweight is not None:
                dense.add_product(dweight, slope, x[rows])
            if dbias is not None:
                dbias.add_(slope.sum(0, dtype=dbias.dtype))
        back = (None if one is None else one.to(x.dtype) for one in (dx, dweight, dbias))
        return (*back, None, None)


def _slope(
    logits: torch.Tensor, at: slice, targets: torch.Tensor, grads: tuple[Optional, ...],
    options: RowOptions,
) -> torch.Tensor:  # fmt: skip
    """The gradient of some rows of logits; formula at the top."""
    z, cap = _shaped(logits, options)
    skip = (targets[at] == options.ignore_index)[:, None]
    index = targets[at][:, None].masked_fill(skip, 0)
    zero = z.new_zeros((len(z), 1))
    d_log, d_lse, d_entropy, d_mean = (
        zero if d is None else d[at, None].to(z.dtype) for d in grads
    )
    p = F.softmax(z, 1)
    hit = p.gather(1, index)
    miss = p.scatter_(1, index, 0.0).sum(1, keepdim=True)
    by_p = d_lse - d_log
    if grads[2] is not None:
        of_hit, others = torch.special.entr(hit), torch.special.entr(p)
        entropy = of_hit + others.sum(1, keepdim=True)
        by_p = by_p - d_entropy * entropy
        slope = p * by_p + d_entropy * others
        at_target = d_log * miss + hit * (d_lse - d_entropy * entropy) + d_entropy * of_hit
    else:
        slope = p * by_p
        at_target = d_log * miss + hit * d_lse
    slope.scatter_(1, index, at_target)
    if grads[3] is not None:
        slope += d_mean / z.shape[1]
    slope = slope / options.temperature if cap is None else slope * cap / options.temperature
    return torch.masked_fill(slope, skip, 0.0)


def _any_batched(grads: tuple[Optional, ...]) -> bool:
    if torch.compiler.is_compiling():
        return False
    return any(one is not None and _runtime.batched(one) for one in grads)


def rows_of(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    targets: torch.Tensor,
    options: RowOptions,
) -> tuple[torch.Tensor, ...]:
    """``log_prob``, ``lse``, ``entropy`` and ``mean`` of rows; tensors have two dimensions."""
    if not torch.compiler.is_compiling() and not _runtime.transformed():
        rows_op.check_labels(name, targets, len(weight), options.ignore_index)
    with _runtime.without_autocast(x.device.type):
        if _runtime.forced() == "reference" or _runtime.transformed():
            return reference(x, weight, bias, targets, options)
        apply: Any = _Rows.apply
        return tuple(apply(x, weight, bias, targets, options))
