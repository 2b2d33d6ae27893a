"""Cross-entropy of logits against labels, one loss for each row.

    lse  = log(sum_j exp(x_j))
    loss = (1 - smoothing) * (lse - x_label) + smoothing * (lse - mean(x))
    dx_j = grad * (exp(x_j - lse) - (1 - smoothing) * [j == label] - smoothing / classes)

Rows with the label ``padding_idx`` have loss 0 and gradient 0 (for a few logits, which torch takes,
only where they are finite). Losses and
``lse`` are float32 for float32, float16 and bfloat16 logits, float64 for float64; gradients have
the logits' dtype, rounded once. Source of smoothing: Szegedy et al., arXiv:1512.00567, section 7.

Who computes: a Triton kernel on a GPU; for a few logits torch's own functions, whose launch is
cheaper; on the CPU torch's softmax over pieces that stay in the cache, which for 512 rows of
32,768 float32 logits takes 56 ms where torch's cross-entropy takes 110, and keeps nothing but the
logits for the backward pass where torch keeps a float32 tensor of their size.

A label that is neither a class nor ``padding_idx`` is an ``IndexError`` on the CPU. Elsewhere the
host cannot know without waiting: from the kernel the row's loss and gradients are nan, torch's own
function stops with an assertion on the device. Nothing is read out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from apex.ops import _memory, _runtime
from apex.ops._library import define, ordinary, tracing
from apex.ops._thresholds import SMALLEST

# A label that no row has: where padding is not wanted.
NO_PADDING = -(2**63)

FUSABLE = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# Logits up to which torch's own functions are called on the CPU, measured forward and backward on
# one thread of an x86 server: at 2**22 float32 or bfloat16 logits both take 8 to 9 ms, at 2**23 the
# operation takes 29 and 17 ms where torch takes 56 and 73, at 2**21 torch is 10 to 30 % faster.
SMALL_ON_CPU = 2**22

# Logits that are computed at a time on the CPU: 1 MiB of float32. Half or twice as many change the
# time by less than 10 %.
PIECE = 2**18

# Logarithm of a label's probability below which float32 has lost digits of ``lse`` in it, all of
# them at -inf: half a rounding of 16 is 1e-6. Guesses among 65,536 classes are at -11. To take the
# largest logit of every row instead would add a quarter to the forward pass.
UNLIKELY = -16.0


def reference(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> torch.Tensor:
    """Compute the definition; differentiable as often as wanted."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        wide, labels.long(), reduction="none", label_smoothing=smoothing, ignore_index=padding_idx
    )


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
        TypeError: A dtype is not what it should be.
        ValueError: A shape, a device or ``smoothing`` is not.
        IndexError: A label is out of range, on the CPU.
    """
    smoothing, padding_idx = float(smoothing), int(padding_idx)
    if tracing():
        return reference(logits, labels, smoothing, padding_idx)
    check("cross_entropy", logits, labels, smoothing)
    if _plain(logits):
        try:
            return reference(logits, labels, smoothing, padding_idx)
        except IndexError:
            check_labels("cross_entropy", labels, logits.shape[1], padding_idx)
            raise
    losses: torch.Tensor = OP(logits, labels, smoothing, padding_idx)[0]
    return losses


def check(who: str, logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> None:
    """Refuse what cannot be computed, without looking at any number on a device."""
    for name, given in (("logits", logits), ("labels", labels)):
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"{who}: {name} are of type {type(given).__name__}; pass a tensor.")
    if not logits.is_floating_point():
        raise TypeError(f"{who}: logits are {logits.dtype}; pass a floating dtype.")
    if labels.dtype not in INTEGERS:
        raise TypeError(f"{who}: labels are {labels.dtype}; pass class numbers, an integer dtype.")
    shape = logits.shape
    if len(shape) != 2 or labels.shape != shape[:1]:
        raise ValueError(
            f"{who}: logits have shape {tuple(logits.shape)} and labels {tuple(labels.shape)}. "
            "Pass (rows, classes) and (rows,): logits.view(-1, classes) and labels.view(-1)."
        )
    if labels.device != logits.device:
        raise ValueError(
            f"{who}: logits are on {logits.device} and labels on {labels.device}. "
            f"Move one: labels.to({str(logits.device)!r})."
        )
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{who}: smoothing is {smoothing}; allowed is 0 to 1.")
    if shape[0] and not shape[1]:
        raise ValueError(f"{who}: logits of shape {tuple(logits.shape)} have no class.")


def check_labels(who: str, labels: torch.Tensor, classes: int, padding_idx: int) -> None:
    """Raise if a label on the CPU is out of range; labels elsewhere are not looked at."""
    if labels.device.type != "cpu" or not labels.numel():
        return
    labels = labels.long()  # a narrower one would wrap the numbers that it is compared with
    bad = ((labels < 0) | (labels >= classes)) & (labels != padding_idx)
    if bad.any():
        row = int(bad.nonzero()[0])
        padding = "" if padding_idx == NO_PADDING else f", or {padding_idx} for rows to leave out"
        raise IndexError(
            f"{who}: the label of row {row} is {int(labels[row])}; "
            f"allowed are 0 to {classes - 1}{padding}."
        )


def _plain(logits: torch.Tensor) -> bool:
    """Whether to call torch's own functions."""
    if torch.compiler.is_compiling():
        # On the CPU the compiler fuses them; what can run is not to be asked while tracing.
        return not (logits.is_cuda and logits.dtype in FUSABLE)
    forced = _runtime.forced()
    if forced == "reference" or (forced is None and logits.numel() <= _small(logits.device)):
        return True
    return not ordinary(logits) or not (fuses(logits) or logits.device.type == "cpu")


def _small(device: torch.device) -> int:
    return SMALL_ON_CPU if device.type == "cpu" else SMALLEST["cross_entropy"] - 1


# -- without gradients ---------------------------------------------------------------------------


def fuses(logits: torch.Tensor) -> bool:
    """Whether a kernel is to compute these logits."""
    return logits.dtype in FUSABLE and _runtime.can_fuse(logits.device)


def forward(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the losses and ``lse``; arguments as those of :func:`cross_entropy`."""
    check_labels("cross_entropy", labels, logits.shape[1], padding_idx)
    if fuses(logits):
        from apex.kernels import cross_entropy as kernels  # late: it imports triton

        return kernels.forward(_rows(logits), labels.contiguous(), smoothing, padding_idx)
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = torch.empty(logits.shape[0], dtype=wide, device=logits.device)
    lse = torch.empty_like(losses)
    index, padded, wrong = _targets(labels, logits.shape[1], padding_idx)
    for rows, buffer in _pieces(logits, wide):
        x = logits[rows]
        logs = torch._log_softmax(x.to(wide), 1, False, out=buffer)
        chosen = logs.gather(1, index[rows])[:, 0]
        loss = chosen * (smoothing - 1.0)
        if smoothing:
            loss.sub_(logs.mean(1), alpha=smoothing)
        losses[rows] = loss
        lse[rows] = _log_of_sum(x, logs, index[rows], chosen)
    losses.masked_fill_(wrong, math.nan).masked_fill_(padded, 0.0)
    return losses, lse.masked_fill_(padded, 0.0)


def _log_of_sum(
    x: torch.Tensor, logs: torch.Tensor, index: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """``lse``, the difference of any logit and its logarithm: of one that loses no digits."""
    found = x.gather(1, index)[:, 0] - chosen
    unlikely = chosen < UNLIKELY
    if x.device.type != "cpu":  # which rows is not to be asked there
        return torch.where(unlikely, x.amax(1) - logs.amax(1), found)
    if unlikely.any():
        found[unlikely] = x[unlikely].amax(1) - logs[unlikely].amax(1)
    return found


def backward_into(
    out: torch.Tensor,
    grad: torch.Tensor,
    logits: torch.Tensor,
    lse: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float,
    padding_idx: int,
) -> torch.Tensor:
    """Write the gradient with respect to ``logits`` into ``out``.

    Args:
        out: Like ``logits``, contiguous along rows; may be ``logits``.
        grad: Of the losses, ``(rows,)``.
        logits: As for :func:`forward`.
        lse: From :func:`forward`. The kernel needs it; torch's softmax finds its own.
        labels: As for :func:`forward`.
        smoothing: As for :func:`forward`.
        padding_idx: As for :func:`forward`.

    Returns:
        ``out``.
    """
    if fuses(logits):
        from apex.kernels import cross_entropy as kernels

        labels = labels.contiguous()
        kernels.backward(grad, _rows(logits), lse.contiguous(), labels, smoothing, padding_idx, out)
        return out
    wide = torch.promote_types(logits.dtype, torch.float32)
    index, padded, wrong = _targets(labels, logits.shape[1], padding_idx)
    grad = grad.to(wide).masked_fill(wrong, math.nan)[:, None]
    for rows, buffer in _pieces(logits, wide):
        slope = torch._softmax(logits[rows].to(wide), 1, False, out=buffer)
        _subtract_target(slope, index[rows], smoothing)
        torch.mul(slope, grad[rows], out=out[rows])
    return _zeroed(out, padded)


def _targets(
    labels: torch.Tensor, classes: int, padding_idx: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Labels that are safe as indices, ``(rows, 1)``; which rows are padded, which are wrong."""
    labels = labels.long()
    padded = labels == padding_idx
    wrong = ((labels < 0) | (labels >= classes)) & ~padded
    return labels.masked_fill(padded | wrong, 0)[:, None], padded, wrong


def _pieces(logits: torch.Tensor, wide: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of rows that stay in the cache, each with room for as many wide numbers."""
    rows, classes = logits.shape
    if not rows:
        return
    height = min(rows, max(1, PIECE // classes)) if logits.device.type == "cpu" else rows
    buffer = torch.empty(height, classes, dtype=wide, device=logits.device)
    for start in range(0, rows, height):
        yield slice(start, start + height), buffer[: rows - start]


def _subtract_target(slope: torch.Tensor, index: torch.Tensor, smoothing: float) -> None:
    if smoothing:
        slope.sub_(smoothing / slope.shape[1])
    slope.scatter_add_(1, index, slope.new_full(index.shape, smoothing - 1.0))


def _zeroed(out: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """Clear padded rows: 0 times inf would be nan."""
    if out.device.type == "cpu":
        return out.index_fill_(0, padded.nonzero()[:, 0], 0.0)
    return out.masked_fill_(padded[:, None], 0.0)


def _rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


# -- as an operation of torch --------------------------------------------------------------------


def gradient(
    grad: torch.Tensor,
    logits: torch.Tensor,
    lse: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float,
    padding_idx: int,
) -> torch.Tensor:
    """Compute the gradient with respect to ``logits``; differentiable where that is asked for."""
    if torch.is_grad_enabled():  # within backward: only with create_graph=True
        losses = reference(logits, labels, smoothing, padding_idx)
        found: torch.Tensor
        (found,) = torch.autograd.grad(losses, logits, grad, create_graph=True)
        return found
    found = BACKWARD(grad, logits, lse, labels, smoothing, padding_idx)
    return found


def _backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    lse: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float,
    padding_idx: int,
) -> torch.Tensor:
    out = _memory.empty(logits.shape, logits.dtype, logits.device)
    return backward_into(out, grad, logits, lse, labels, smoothing, padding_idx)


def _fake(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, padding_idx: int
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = logits.new_empty(logits.shape[:1], dtype=wide)
    return losses, torch.empty_like(losses)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels, ctx.smoothing, ctx.padding_idx = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, labels, output[1])


def _of_op(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    logits, labels, lse = ctx.saved_tensors
    return gradient(grad, logits, lse, labels, ctx.smoothing, ctx.padding_idx), None, None, None


BACKWARD = define(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor lse, Tensor labels,"
    " float smoothing, int padding_idx) -> Tensor",
    _backward,
    lambda grad, logits, *_: logits.new_empty(logits.shape),
)
OP = define(
    "cross_entropy(Tensor logits, Tensor labels, float smoothing, int padding_idx)"
    " -> (Tensor losses, Tensor lse)",
    forward,
    _fake,
    keep=_keep,
    backward=_of_op,
)
