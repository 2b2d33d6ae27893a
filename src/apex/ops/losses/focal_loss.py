"""Focal loss: cross-entropy of one sigmoid a class, with easy examples weighted down.

With ``u = -x`` for the class of an anchor and ``u = x`` for every other class::

    term = weight * sigmoid(u)**gamma * (log(1 + exp(u)) - smoothing / 2 * u)
    loss = sum(term) / num_positives

``weight`` is ``alpha`` for the class of an anchor, else ``1 - alpha``. Lin et al., "Focal Loss for
Dense Object Detection", arXiv:1708.02002, equation 5, with targets ``1 - smoothing / 2`` and
``smoothing / 2``. Anchors with target -1 are background, those with target -2 do not count, and
neither do logits from column ``classes`` on, which pad rows.

The loss is float32 (float64 for float64 logits), gradients have the logits' dtype, rounded once. A
target that is not -2, -1 or a class is an ``IndexError`` on a CPU. Where the host would have to
wait for the targets, and in compiled graphs and transforms, the loss is nan, and so are the
gradients of that anchor.

Bytes an element in 16 bits, forward and backward: torch's functions of the definition read and
write 261, the kernels 6: a logit is read in each pass and its gradient written.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from apex.ops import _runtime
from apex.ops._check import FLOATS, INTEGERS, ArgumentError, check_shape, check_tensors, traced
from apex.ops._dtypes import wide
from apex.ops._op import op

IGNORED = -2  # the target of anchors that do not count


def reference(
    logits: torch.Tensor, targets: torch.Tensor, num_positives: torch.Tensor, classes: int,
    alpha: float, gamma: float, smoothing: float, *, are_checked: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute the definition; ``are_checked``: all targets are known to be in range."""
    to, targets = wide(logits), targets.long().unsqueeze(-1)  # -2 is no uint8
    ignored = targets == IGNORED
    positive = targets == torch.arange(classes, device=logits.device)
    padded = not are_checked or logits.shape[-1] != classes
    u = (
        (logits.narrow(-1, 0, classes) if padded else logits).to(to).masked_fill(ignored, 0.0)
    )  # nan there has no gradient
    u = torch.where(positive, -u, u)
    loss = F.softplus(u, threshold=40.0)  # from 20 on, torch's default, float64 is not exact
    if smoothing:
        loss = loss - smoothing / 2 * u
    if gamma == int(gamma):
        power = torch.sigmoid(u).pow(gamma)
    else:  # whose derivative is finite where sigmoid(u) is 0
        power = torch.exp(gamma * F.logsigmoid(u))
    weight = torch.where(positive, u.new_full((), alpha), 1.0 - alpha)
    sums = (weight * power * loss).sum(-1, keepdim=True)
    if are_checked:
        counts = torch.where(ignored, u.new_zeros(()), 1.0)
    else:
        known = (targets >= IGNORED) & (targets < classes)
        counts = torch.where(known, u.new_ones(()), torch.nan).masked_fill(ignored, 0.0)
    return (sums * counts).sum() / num_positives.to(to).reshape(())


def _fitting(
    logits: torch.Tensor, targets: Any, num_positives: Any, classes: Any, alpha: Any, gamma: Any,
    smoothing: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    shares = type(classes) is int and type(alpha) is type(gamma) is type(smoothing) is float
    if not shares or num_positives.dtype not in _runtime.DTYPES or num_positives.numel() != 1:
        return None
    *shape, columns = logits.shape
    if not (
        targets.dtype in INTEGERS
        and [*targets.shape] == shape
        and 1 <= classes <= columns
        and 0.0 <= alpha <= 1.0
        and 0.0 <= smoothing <= 1.0
        and 0.0 <= gamma < math.inf
    ):
        return None
    if targets.is_cpu:
        _check_targets("focal_loss", targets, classes)
    return logits, targets, num_positives, classes, alpha, gamma, smoothing


def _torchs(
    logits: torch.Tensor, targets: torch.Tensor, num_positives: torch.Tensor, *rest: Any
) -> torch.Tensor | None:
    device = logits.device  # torch takes a number on a CPU beside a device
    if logits.dtype not in FLOATS or not device == targets.device == num_positives.device:
        return None
    args = _fitting(logits, targets, num_positives, *rest)
    return None if args is None else reference(*args, are_checked=targets.is_cpu)


OP = op(
    "focal_loss(Tensor logits, Tensor targets, Tensor num_positives, int classes, float alpha,"
    " float gamma, float smoothing) -> Tensor loss",
    reference,
    grads=("logits",),
    compiles_to_operator=lambda *args: False,
    torchs=_torchs,
    fitting=_fitting,
)


def focal_loss(
    cls_output: torch.Tensor, cls_targets_at_level: torch.Tensor, num_positives_sum: torch.Tensor,
    num_real_classes: int, alpha: float, gamma: float, label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Check the arguments, see `apex.contrib.focal_loss.focal_loss`, and compute."""
    args: Any = (
        cls_output, cls_targets_at_level, num_positives_sum, num_real_classes, alpha, gamma,
        label_smoothing,
    )  # fmt: skip
    y = OP.usual(*args)
    return OP(*checked("focal_loss", *args)) if y is None else y


def checked(
    name: str, logits: torch.Tensor, targets: torch.Tensor, num_positives: torch.Tensor,
    classes: int, alpha: float, gamma: float, smoothing: float,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments in the operation's types.

    Raises:
        ArgumentError: A type, dtype, shape, device or number is not what it should be.
        IndexError: A target on a CPU is out of range.
    """
    tensors = {"cls_output": logits, "targets": targets, "num_positives_sum": num_positives}
    check_tensors(name, tensors, floating=["cls_output"], integers=["targets"], required=tensors)
    given, classes = classes, int(classes)
    alpha, gamma, smoothing = float(alpha), float(gamma), float(smoothing)
    for key, share in {"alpha": alpha, "label_smoothing": smoothing}.items():
        if not 0.0 <= share <= 1.0:
            raise ArgumentError(f"{name}: {key} is {share}; pass a number from 0 to 1.")
    if num_positives.is_complex():
        raise ArgumentError(
            f"{name}: num_positives_sum is {num_positives.dtype}; pass a real dtype."
        )
    if not 0.0 <= gamma < float("inf"):
        raise ArgumentError(f"{name}: gamma is {gamma}; pass a number of 0 or more.")
    if not traced():
        shape = list(logits.shape)
        if not shape or not 1 <= classes == given <= shape[-1]:
            raise ArgumentError(
                f"{name}: num_real_classes is {given} and cls_output has shape {shape}. Pass a "
                "cls_output of shape (..., columns), and num_real_classes from 1 to columns."
            )
        check_shape(name, "targets", targets, logits.shape[:-1], f"cls_output {shape}")
        total = num_positives.reshape(-1)
        check_shape(name, "num_positives_sum", total, (1,), "has to be one number")
    if targets.is_cpu and not (_runtime.recorded() or _runtime.transformed()):
        _check_targets(name, targets, classes)
    return logits, targets, num_positives, classes, alpha, gamma, smoothing


def _check_targets(name: str, targets: torch.Tensor, classes: int) -> None:
    if not targets.numel():
        return
    low, high = torch.aminmax(targets)
    if low.item() < IGNORED or high.item() >= classes:
        targets = targets.reshape(-1).long()  # -2 is no uint8
        at = int(((targets < IGNORED) | (targets >= classes)).nonzero()[0])
        raise IndexError(
            f"{name}: the target of anchor {at} is {int(targets[at])}; allowed are 0 to "
            f"{classes - 1}, -1 for background, and {IGNORED} for anchors to ignore."
        )
