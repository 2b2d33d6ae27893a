"""Cross-entropy of logits against labels, one loss for each row.

    lse  = log(sum_j exp(x_j))          p_j = exp(x_j - lse)
    loss = (1 - smoothing) * (lse - x_label) + smoothing * (lse - mean(x))
    dx_j = dy * (p_j - smoothing / classes)                    for j != label
    dx_label = dy * (smoothing - smoothing / classes - miss)   where miss = sum of the other p_j

``miss`` is ``1 - p_label``, added up: near probability 1 a difference would cancel.

Rows with the label ``padding_idx`` have loss 0 and gradient 0 (by PyTorch's functions, of up to 4
million logits on a CPU, only where their logits are finite). Losses and ``lse`` are float32,
float64 for float64; gradients have the logits' dtype, rounded once. Source of smoothing: Szegedy et
al., arXiv:1512.00567, sec. 7.

A label that is neither a class nor ``padding_idx`` is an ``IndexError`` on a CPU. On a GPU the host
cannot know without waiting: from the kernel the row's loss and gradients are nan, PyTorch's own
functions stop with an assertion on the device. Nothing is read out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from apex._compat import private
from apex.ops._by_row import by_row
from apex.ops._check import FLOATS, INTEGERS, ArgumentError, check_tensors, traced
from apex.ops._dtypes import WIDE, Optional, wide
from apex.ops._op import op

NO_PADDING = -(2**63)  # a label that no row has
_of_torch: Any = private.cross_entropy_loss  # torch's stub of it is wrong in a type
_is_transformed, _forward_ad = private.are_functorch_transforms_active, private.forward_ad


def reference(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> torch.Tensor:
    """Compute the definition, whose gradients of any order have no ``p_label - 1``.

    Without smoothing the loss is ``log(1 + exp(others - x_label))``; ``others`` is the ``lse`` of
    the other logits. The largest logit is subtracted first, which makes a row with an inf nan.
    """
    x, labels = logits.to(wide(logits)), labels.long()
    if not traced() and not x.shape[1]:  # and no row
        return x.sum(1)
    padded = labels == padding_idx
    index = labels.masked_fill(padded, 0)[:, None]
    x = x - x.detach().amax(1, keepdim=True)
    least = torch.finfo(
        x.dtype
    ).min  # not -inf: the gradient where all others are -inf would be nan
    others = x.scatter(1, index, least).logsumexp(1)
    losses = -F.logsigmoid(x.gather(1, index)[:, 0] - others)
    if smoothing:
        losses = (1.0 - smoothing) * losses + smoothing * (x.logsumexp(1) - x.mean(1))
    return losses.masked_fill(padded, 0.0)


# -- in pieces, on a CPU -------------------------------------------------------------------------

# A piece stays in the cache, and only the logits are kept for the backward. Forward and backward of
# 512 x 32,768 logits, one thread of a busy Xeon: 0.72 of PyTorch's function's time.
PIECE = 2**18  # logits: 1 MiB of float32; half or twice as many change the time by less than 10 %
# Up to so many logits an eager call is PyTorch's function, which keeps their log-softmax.
SMALL = 2**22
# On a device without kernels, for `linear_cross_entropy`: 8 MiB. Launches are few beside that.
DEVICE_PIECE = 2**21


def _allocate(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses = logits.new_empty(logits.shape[:1], dtype=wide(logits))
    return losses, losses.new_empty((*losses.shape, 2))


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Slices of rows, of the logits first."""
    logits = tensors[0]
    height = max(1, (PIECE if logits.is_cpu else DEVICE_PIECE) // logits.shape[1])
    if len(logits) <= height:
        return iter([tensors])
    return zip(*[torch.split(one, height) for one in tensors], strict=True)


def _forward(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int,
    wants_lse: bool = True,
) -> tuple[torch.Tensor, Optional]:  # fmt: skip
    """Losses, and ``lse`` beside a 0 for ``miss``: :func:`_backward` computes both itself."""
    losses: list[torch.Tensor] = []
    lse: list[torch.Tensor] = []
    buffer: Optional = None
    for x, y in _pieces(logits, labels.long()):
        buffer = x.new_empty(x.shape, dtype=wide(x)) if buffer is None else buffer
        logs = buffer[: len(x)]
        torch.log_softmax(x, 1, dtype=logs.dtype, out=logs)  # without a cast of x beside it
        losses.append(_losses(logs, y, smoothing, padding_idx))
        if wants_lse:
            found = (x.amax(1) - logs.amax(1)).masked_fill_(y == padding_idx, 0.0)
            lse.append(torch.stack([found, torch.zeros_like(found)], 1))
    return _joined(losses), _joined(lse) if wants_lse else None


def _losses(
    logs: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> torch.Tensor:
    found = F.nll_loss(logs, labels, ignore_index=padding_idx, reduction="none")
    return _smoothed(found, logs, labels, smoothing, padding_idx) if smoothing else found


def _smoothed(
    losses: torch.Tensor, logs: torch.Tensor, labels: torch.Tensor, smoothing: float,
    padding_idx: int,
) -> torch.Tensor:  # fmt: skip
    """Losses with smoothing, written over those without."""
    total = logs.sum(1).masked_fill_(labels == padding_idx, 0.0)  # its backward writes no tensor
    return losses.mul_(1.0 - smoothing).sub_(total, alpha=smoothing / max(logs.shape[1], 1))


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _backward(
    dy: torch.Tensor, needs: Sequence[bool], *, logits: torch.Tensor, labels: torch.Tensor,
    smoothing: float, padding_idx: int, out: Optional = None, **_: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradient of the logits, written into ``out`` if given, which may be ``logits``."""
    index = labels.long()[:, None]
    padded = index == padding_idx
    # On a CPU padded rows alone are written; elsewhere the host would wait for their numbers.
    alone = padded.nonzero()[:, 0] if logits.is_cpu else None
    if alone is None or len(alone):
        index = index.masked_fill(padded, 0)
    if out is None and logits.numel() > PIECE:  # pieces, which are not joined
        out = torch.empty_like(logits)
    found: list[torch.Tensor] = []
    buffer: Optional = None
    columns = logits, index, dy[:, None], *([] if out is None else [out])
    for x, at, d, *to in _pieces(*columns):
        buffer = x.new_empty(x.shape, dtype=wide(x)) if buffer is None else buffer
        slope = buffer[: len(x)]
        torch.softmax(x, 1, dtype=slope.dtype, out=slope)
        if smoothing:
            slope.sub_(smoothing / x.shape[1])
        slope.scatter_(1, at, 0.0)  # the sum of all is 0
        slope.scatter_(1, at, slope.sum(1, keepdim=True).neg_())
        found.append(torch.mul(slope, d, out=to[0]) if to else slope.mul_(d).to(x.dtype))
    out = _joined(found) if out is None else out
    if alone is None:
        return [out.masked_fill_(padded, 0.0)]
    return [out.index_fill_(0, alone, 0.0) if len(alone) else out]


# -- by PyTorch's functions ----------------------------------------------------------------------

# Rows with a loss up to this, of a probability from 0.9 on, have their gradient corrected. Others
# keep ``p_label - 1``, whose relative error is at most ten times that of a sum. To look at the
# losses takes 1 to 2 us a call, with rows of padding 3 to 7. The correction adds 17 to 25 us to a
# forward and backward of 18 to 63 us, and 15 to 25 % from 256,000 logits on (an EPYC, one thread).
CERTAIN = 0.11


def _torchs(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> torch.Tensor | None:
    """By those that F.cross_entropy calls, which check sizes and labels themselves."""
    if labels.dtype != torch.int64:
        if labels.dtype not in INTEGERS:  # floating ones would be probabilities
            return None
        labels = labels.long()
    if (
        logits.dtype not in FLOATS
        or logits.dim() != 2
        or not logits.is_cpu
        or not 0.0 <= smoothing <= 1.0
        or _is_transformed()  # derivatives without a graph
        or _forward_ad._current_level >= 0
    ):
        return None
    x = logits if logits.dtype in WIDE else logits.float()
    if smoothing:
        logs = torch.log_softmax(x, 1)
        y = F.nll_loss(logs, labels, ignore_index=padding_idx, reduction="none")
    else:  # the same in one call. 0: no reduction
        y = _of_torch(x, labels, None, 0, padding_idx, 0.0)
    if y.requires_grad and y.dtype != torch.float64:
        losses, few = y.detach(), y.numel() <= 32  # of few rows lists take 0.7 to 3 us less
        least = min(losses.tolist()) if few else losses.min().item()
        if least <= 0.0 and few:  # perhaps of a row of padding
            rows = zip(losses.tolist(), labels.tolist(), strict=True)
            least = min([loss for loss, label in rows if label != padding_idx], default=math.inf)
        elif least <= 0.0:
            least = losses.masked_fill(labels == padding_idx, math.inf).min().item()
        if least <= CERTAIN:
            _correct(y, losses, labels, padding_idx)
    return _smoothed(y, logs, labels, smoothing, padding_idx) if smoothing else y


def _correct(y: torch.Tensor, losses: torch.Tensor, labels: torch.Tensor, padding_idx: int) -> None:
    """Let the backward of ``y`` correct the label's gradient where ``losses`` are small.

    The exact gradient of a row sums up to 0. So the label's lacks what the computed sum lacks.
    """
    passes = losses > CERTAIN
    index, passes = labels.masked_fill(labels == padding_idx, 0)[:, None], passes[:, None]

    def corrected(slopes: tuple[Optional], _: Any) -> tuple[Optional]:
        (slope,) = slopes
        if slope is None:
            return slopes
        missing = slope.sum(1, keepdim=True).neg().masked_fill(passes, 0.0)
        add = slope.scatter_add if torch.is_grad_enabled() else slope.scatter_add_
        return (add(1, index, missing),)

    node: Any = y.grad_fn
    node.next_functions[0][0].register_hook(corrected)  # the log-softmax's


def _fitting(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> tuple[Any, ...] | None:
    fits = labels.dtype == torch.int64 and logits.dim() == 2 and labels.shape == logits.shape[:1]
    if not fits or not 0.0 <= smoothing <= 1.0:
        return None
    return logits, labels, float(smoothing), int(padding_idx)


# Eager calls need no lse, which takes two passes over a piece.
_EAGER = SimpleNamespace(forward=partial(_forward, wants_lse=False), backward=_backward)
OP = op(
    "cross_entropy(Tensor logits, Tensor labels, float smoothing, int padding_idx)"
    " -> (Tensor losses, Tensor sums)",
    reference,
    grads=("logits",),
    allocate=_allocate,
    pieces=SimpleNamespace(forward=_forward, backward=_backward, above=SMALL, eager=_EAGER),
    contiguous=False,
    torchs=_torchs,
    fitting=_fitting,
)
by_row(OP, reference, share_rows=False)


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    smoothing: float = 0.0,
    padding_idx: int = NO_PADDING,
) -> torch.Tensor:
    """Compute the loss of each row.

    Args:
        logits: ``(rows, classes)``, any floating dtype.
        labels: ``(rows,)``, any integer dtype, on the same device.
        smoothing: Share of the target that is spread evenly over all classes, from 0 to 1.
        padding_idx: Label of rows whose loss and gradient are 0.

    Returns:
        ``(rows,)``, float32, or float64 for float64 logits.

    Raises:
        ArgumentError: A type, dtype, shape, device or ``smoothing`` is not what it should be.
        IndexError: A label is out of range, on a CPU.
    """
    return losses(logits, labels, smoothing, padding_idx)


def losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float = 0.0,
    padding_idx: int = 0,
    half_to_float: bool = False,
) -> torch.Tensor:
    """Compute the loss of each row, with the arguments of NVIDIA's Apex."""
    try:
        y = OP.usual(logits, labels, smoothing, padding_idx)
    except (IndexError, RuntimeError):
        y = None
    if y is not None:
        return y
    smoothing, padding_idx = float(smoothing), int(padding_idx)
    check("cross_entropy", logits, labels, smoothing)
    try:
        return OP(logits, labels, smoothing, padding_idx)
    except (IndexError, RuntimeError):  # PyTorch's says neither which row nor what is allowed
        check_labels("cross_entropy", labels, logits.shape[1], padding_idx)
        raise


def check(name: str, logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> None:
    """Refuse what cannot be computed, without looking at any number on a device."""
    tensors = {"logits": logits, "labels": labels}
    check_tensors(name, tensors, floating=["logits"], integers=["labels"], required=["labels"])
    if not 0.0 <= smoothing <= 1.0:
        raise ArgumentError(f"{name}: smoothing is {smoothing}; pass a number from 0 to 1.")
    if traced():
        return
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ArgumentError(
            f"{name}: logits have shape {list(logits.shape)} and labels {list(labels.shape)}. "
            "Pass (rows, classes) and (rows,): logits.view(-1, classes) and labels.view(-1)."
        )
    if not logits.shape[1] and logits.shape[0]:
        raise ArgumentError(
            f"{name}: logits of shape {list(logits.shape)} have no classes. Pass at least one "
            "column."
        )


def check_labels(name: str, labels: torch.Tensor, classes: int, padding_idx: int) -> None:
    """Raise ``IndexError`` if a label on a CPU is out of range; no other is looked at."""
    if not labels.is_cpu:
        return
    labels = labels.long()  # a narrower one would wrap the numbers that it is compared with
    bad = ((labels < 0) | (labels >= classes)) & (labels != padding_idx)
    if bad.any():
        row = int(bad.nonzero()[0])
        padding = "" if padding_idx == NO_PADDING else f", or {padding_idx} for rows to ignore"
        raise IndexError(
            f"{name}: the label of row {row} is {int(labels[row])}; "
            f"allowed are 0 to {classes - 1}{padding}."
        )
