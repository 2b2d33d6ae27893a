"""Cross-entropy of logits against labels, one loss for each row.

    lse  = log(sum_j exp(x_j))          p_j = exp(x_j - lse)
    loss = (1 - smoothing) * (lse - x_label) + smoothing * (lse - mean(x))
    dx_j = dy * (p_j - smoothing / classes)                    for j != label
    dx_label = dy * (smoothing - smoothing / classes - miss)   where miss = sum of the other p_j

``miss`` is ``1 - p_label``, added up: near probability 1 a difference would cancel.

Rows with the label ``padding_idx`` have loss 0 and gradient 0 (by the definition only where their
logits are finite). Losses and ``lse`` are float32, float64 for float64; gradients have the logits'
dtype, rounded once. Source of smoothing: Szegedy et al., arXiv:1512.00567, sec. 7.

A label that is neither a class nor ``padding_idx`` is an ``IndexError`` on a CPU. On a GPU the host
cannot know without waiting: from the kernel the row's loss and gradients are nan, PyTorch's own
functions stop with an assertion on the device. Nothing is read out of bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from apex._compat import private
from apex.ops._by_row import by_row
from apex.ops._check import FLOATS, ArgumentError, check_tensors, traced
from apex.ops._dtypes import Optional, wide
from apex.ops._op import op

NO_PADDING = -(2**63)  # a label that no row has


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

# A piece stays in the cache. Above KEPT only the logits are kept for the backward. Forward and
# backward of 512 x 32,768 logits, one thread of a busy Xeon: 0.72 of PyTorch's function's time.
PIECE = 2**18  # logits: 1 MiB of float32; half or twice as many change the time by less than 10 %
# Up to so many logits PyTorch's function of float64 is faster than an `autograd.Function`, of which
# the call alone costs as much (1.25 and 1.9 times the time in float32 for 128 x 10).
SMALL = 2**11
# Up to so many an eager call keeps their log-softmax, as PyTorch's function does. To make it again
# in the backward takes 1.3 to 1.9 of that function's time there.
KEPT = 2**22
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
    for x, y in _pieces(logits, labels.long()):
        logs = x.new_empty(x.shape, dtype=wide(x))
        torch.log_softmax(x, 1, dtype=logs.dtype, out=logs)  # without a cast of x beside it
        losses.append(_losses(logs, y, smoothing, padding_idx))
        if wants_lse:
            found = (x.amax(1) - logs.amax(1)).masked_fill_(y == padding_idx, 0.0)
            lse.append(torch.stack([found, torch.zeros_like(found)], 1))
        del logs
    return _joined(losses), _joined(lse) if wants_lse else None


def _losses(
    logs: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> torch.Tensor:
    found = F.nll_loss(logs, labels, ignore_index=padding_idx, reduction="none")
    if smoothing:
        mean = logs.mean(1).masked_fill_(labels == padding_idx, 0.0)
        found.mul_(1.0 - smoothing).sub_(mean, alpha=smoothing)
    return found


def _eager_forward(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> tuple[torch.Tensor, Optional]:
    """Losses, and the logs of probabilities if the backward is to read them."""
    if logits.numel() > KEPT:
        return _forward(logits, labels, smoothing, padding_idx, wants_lse=False)
    logs = torch.log_softmax(logits, 1, dtype=wide(logits))
    return _losses(logs, labels.long(), smoothing, padding_idx), logs


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _backward(
    dy: torch.Tensor, needs: Sequence[bool], *, logits: torch.Tensor, labels: torch.Tensor,
    smoothing: float, padding_idx: int, out: Optional = None, logs: Optional = None, **_: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradient of the logits, written into ``out`` if given, which may be ``logits``."""
    index = labels.long()[:, None]
    padded = index == padding_idx
    # On a CPU padded rows alone are written; elsewhere the host would wait for their numbers.
    alone = padded.nonzero()[:, 0] if logits.is_cpu else None
    if alone is None or len(alone):
        index = index.masked_fill(padded, 0)
    if out is None and logs is None and logits.numel() > PIECE:  # pieces, which are not joined
        out = torch.empty_like(logits)
    found = []
    columns = logits, index, dy[:, None], *([] if out is None else [out])
    for x, at, d, *to in _pieces(*columns) if logs is None else [columns]:
        if logs is None:
            slope = x.new_empty(x.shape, dtype=wide(x))
            torch.softmax(x, 1, dtype=slope.dtype, out=slope)
        else:
            slope = logs.exp()
        if smoothing:
            slope.sub_(smoothing / x.shape[1])
        slope.scatter_(1, at, 0.0)  # the sum of all is 0
        slope.scatter_(1, at, slope.sum(1, keepdim=True).neg_())
        slope.mul_(d)
        found.append(to[0].copy_(slope) if to else slope.to(x.dtype))
        del slope  # before the next one is made
    out = _joined(found) if out is None else out
    if alone is None:
        return [out.masked_fill_(padded, 0.0)]
    return [out.index_fill_(0, alone, 0.0) if len(alone) else out]


def _torchs(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> torch.Tensor | None:
    """By the function that F.cross_entropy calls, which checks sizes and labels itself."""
    if (
        labels.dtype != torch.int64  # floating ones would be probabilities
        or logits.dim() != 2
        or logits.dtype not in FLOATS
        or not logits.numel()
        or not logits.is_cpu
        or not 0.0 <= smoothing <= 1.0
    ):
        return None
    # In float64 ``p_label - 1`` keeps seven digits more than float32 has. 0: no reduction.
    y: torch.Tensor = _of_torch(logits.double(), labels, None, 0, padding_idx, smoothing)
    return y if logits.dtype == torch.float64 else y.float()


def _fitting(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> tuple[Any, ...] | None:
    fits = labels.dtype == torch.int64 and logits.dim() == 2 and labels.shape == logits.shape[:1]
    if not fits or not 0.0 <= smoothing <= 1.0:
        return None
    return logits, labels, float(smoothing), int(padding_idx)


# torch's stub of it is wrong in a type.
_of_torch: Any = private.cross_entropy_loss


def _eager_backward(
    dy: torch.Tensor, needs: Sequence[bool], *, sums: Optional, **saved: Any
) -> list[torch.Tensor]:
    return _backward(dy, needs, logs=sums, **saved)


# Eager calls need no lse, which takes two passes over a piece.
_EAGER = SimpleNamespace(forward=_eager_forward, backward=_eager_backward)
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
    """Compute the loss of each row: :func:`cross_entropy` with the arguments of NVIDIA's Apex."""
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
        raise ArgumentError(f"{name}: smoothing is {smoothing}; allowed is 0 to 1.")
    if traced():
        return
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ArgumentError(
            f"{name}: logits have shape {list(logits.shape)} and labels {list(labels.shape)}. "
            "Pass (rows, classes) and (rows,): logits.view(-1, classes) and labels.view(-1)."
        )
    if not logits.shape[1] and logits.shape[0]:
        raise ArgumentError(f"{name}: logits of shape {list(logits.shape)} have no class.")


def check_labels(name: str, labels: torch.Tensor, classes: int, padding_idx: int) -> None:
    """Raise ``IndexError`` if a label on a CPU is out of range; no other is looked at."""
    if not labels.is_cpu:
        return
    labels = labels.long()  # a narrower one would wrap the numbers that it is compared with
    bad = ((labels < 0) | (labels >= classes)) & (labels != padding_idx)
    if bad.any():
        row = int(bad.nonzero()[0])
        padding = "" if padding_idx == NO_PADDING else f", or {padding_idx} for rows to leave out"
        raise IndexError(
            f"{name}: the label of row {row} is {int(labels[row])}; "
            f"allowed are 0 to {classes - 1}{padding}."
        )
