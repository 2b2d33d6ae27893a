"""Cross-entropy of logits against labels, one loss for each row.

    lse  = log(sum_j exp(x_j))
    loss = (1 - smoothing) * (lse - x_label) + smoothing * (lse - mean(x))
    dx_j = dy * (exp(x_j - lse) - (1 - smoothing) * [j == label] - smoothing / classes)

Rows with the label ``padding_idx`` have loss 0 and gradient 0 (by the definition, which few logits
take, only where they are finite). Losses and ``lse`` are float32, float64 for float64; gradients
have the logits' dtype, rounded once. Source of smoothing: Szegedy et al., arXiv:1512.00567, sec. 7.

A label that is neither a class nor ``padding_idx`` is an ``IndexError`` on a CPU. On a GPU the host
cannot know without waiting: from the kernel the row's loss and gradients are nan, PyTorch's own
function stops with an assertion on the device. Nothing is read out of bounds.
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
from apex.ops._check import FLOATS, ArgumentError, check_tensors, traced
from apex.ops._dtypes import WIDE, Optional, wide
from apex.ops._op import op

NO_PADDING = -(2**63)  # a label that no row has


def reference(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> torch.Tensor:
    """Compute the definition."""
    return F.cross_entropy(
        logits.to(wide(logits)), labels.long(), reduction="none", label_smoothing=smoothing,
        ignore_index=padding_idx,
    )  # fmt: skip


# -- in pieces, on a CPU -------------------------------------------------------------------------

# A piece stays in the cache, and only the logits are kept for the backward. Forward and backward of
# 512 x 32,768 logits, one thread of a busy EPYC, least of 12: in float32 94 ms where PyTorch takes
# 170, in bfloat16 92 for 253. With up to SMALL logits PyTorch's functions are as fast or faster.
SMALL = 2**22
PIECE = 2**18  # logits: 1 MiB of float32; half or twice as many change the time by less than 10 %
# On a device without kernels, for `linear_cross_entropy`: 16 MiB. Launches are few beside that.
DEVICE_PIECE = 2**22


def _allocate(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses = logits.new_empty(logits.shape[:1], dtype=wide(logits))
    return losses, torch.empty_like(losses)


def _pieces(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of rows, each with memory for as many float32 numbers."""
    height = max(1, (PIECE if logits.is_cpu else DEVICE_PIECE) // logits.shape[1])
    buffer = logits.new_empty((min(height, len(logits)), logits.shape[1]), dtype=wide(logits))
    for start in range(0, len(logits), height):
        yield slice(start, start + height), buffer[: len(logits) - start]


def _forward(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int,
    wants_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    (losses, lse), labels = _allocate(logits), labels.long()
    for rows, logs in _pieces(logits):
        torch.log_softmax(logits[rows], 1, dtype=logs.dtype, out=logs)
        losses[rows] = F.nll_loss(logs, labels[rows], ignore_index=padding_idx, reduction="none")
        if smoothing:
            losses[rows].mul_(1.0 - smoothing).sub_(logs.mean(1), alpha=smoothing)
        if wants_lse:
            lse[rows] = logits[rows].amax(1) - logs.amax(1)
    padded = labels == padding_idx
    lse = lse.masked_fill_(padded, 0.0) if wants_lse else lse.fill_(math.nan)
    return losses.masked_fill_(padded, 0.0), lse


def _backward(
    dy: torch.Tensor, needs: Sequence[bool], *, logits: torch.Tensor, labels: torch.Tensor,
    smoothing: float, padding_idx: int, out: Optional = None, **_: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradient of the logits, written into ``out`` if given, which may be ``logits``."""
    out = torch.empty_like(logits) if out is None else out
    labels, dy = labels.long()[:, None], dy.to(wide(logits))[:, None]
    padded = labels == padding_idx
    index = labels.masked_fill(padded, 0)
    for rows, slope in _pieces(logits):
        torch.softmax(logits[rows], 1, dtype=slope.dtype, out=slope)
        if smoothing:
            slope.sub_(smoothing / logits.shape[1])
        slope.scatter_add_(1, index[rows], slope.new_full(index[rows].shape, smoothing - 1.0))
        torch.mul(slope, dy[rows], out=out[rows])
    if out.is_cpu:  # padded rows alone; elsewhere the host would wait for their numbers
        return [out.index_fill_(0, padded.nonzero()[:, 0], 0.0)]
    return [out.masked_fill_(padded, 0.0)]


def _torchs(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> torch.Tensor | None:
    """By the function that F.cross_entropy calls, which checks sizes and labels itself."""
    if (
        labels.dtype != torch.int64  # floating ones would be probabilities
        or logits.dim() != 2
        or logits.dtype not in FLOATS
        or not logits.numel()
        or not 0.0 <= smoothing <= 1.0
    ):
        return None
    x = logits if logits.dtype in WIDE else logits.float()
    y: torch.Tensor = _of_torch(x, labels, None, 0, padding_idx, smoothing)  # 0: whole
    return y


def _fitting(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> tuple[Any, ...] | None:
    fits = labels.dtype == torch.int64 and logits.dim() == 2 and labels.shape == logits.shape[:1]
    if not fits or not 0.0 <= smoothing <= 1.0:
        return None
    return logits, labels, float(smoothing), int(padding_idx)


# torch's stub of it is wrong in a type.
_of_torch: Any = private.cross_entropy_loss

# Eager calls, whose backward makes the softmax again, read no lse: that takes two passes over a
# piece, a fifth of the forward's time.
_EAGER = SimpleNamespace(forward=partial(_forward, wants_lse=False), backward=_backward)
OP = op(
    "cross_entropy(Tensor logits, Tensor labels, float smoothing, int padding_idx)"
    " -> (Tensor losses, Tensor lse)",
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
        if y is None:
            smoothing, padding_idx = float(smoothing), int(padding_idx)
            check("cross_entropy", logits, labels, smoothing)
            y = OP(logits, labels, smoothing, padding_idx)
        return y
    except IndexError:  # PyTorch's says neither which row nor what is allowed
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
