"""``SoftmaxCrossEntropyLoss``: one loss for each row of logits, label smoothing included."""

from __future__ import annotations

from typing import Any

import torch

from apex.ops._function import Chosen
from apex.ops.losses import cross_entropy as ops

__all__ = ["SoftmaxCrossEntropyLoss"]


def _apply(
    logits: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float = 0.0,
    padding_idx: int = 0,
    half_to_float: bool = False,
) -> torch.Tensor:
    """Let the operation choose: torch's own functions are cheaper for a few logits."""
    return ops.cross_entropy(logits, labels, smoothing=smoothing, padding_idx=padding_idx)


class SoftmaxCrossEntropyLoss(Chosen):
    """Cross-entropy with label smoothing, to be called by ``apply``; no reduction.

    ``SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing=0.0, padding_idx=0,
    half_to_float=False)``: logits ``(rows, classes)`` of any floating dtype, labels ``(rows,)`` of
    any integer dtype; losses ``(rows,)`` in float32 (float64 for float64). Formula, errors and what
    runs where: :mod:`apex.ops.losses.cross_entropy`.

    **Class 0 is ignored by default**, as in NVIDIA's Apex: rows with the label ``padding_idx``, 0,
    have loss 0 and gradient 0. If 0 is one of your classes, pass a ``padding_idx`` that is no
    label, such as -100. ``half_to_float`` has no effect: losses are always float32, and gradients
    have the logits' dtype.

    Options may be passed by keyword. Two of torch's rules for autograd functions limit that: under
    ``torch.compile`` all options before a keyword must be given, and before torch 2.13 it takes no
    keywords; ``torch.jit.script`` takes none at all.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
        >>> SoftmaxCrossEntropyLoss.apply(logits, torch.tensor([1, 0]))
        tensor([0.6931, 0.0000])
    """

    function = staticmethod(_apply)

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> torch.Tensor:
        """Compute the losses; what the compiler traces, and what a subclass inherits."""
        smoothing, padding_idx = float(smoothing), int(padding_idx)
        ops.check("SoftmaxCrossEntropyLoss", logits, labels, smoothing)
        losses: torch.Tensor = ops.OP.save_and_run(ctx, logits, labels, smoothing, padding_idx)
        return losses

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> Any:
        """Compute the gradient of the logits; ``grad_loss`` stays as it is."""
        return *ops.OP.gradients(ctx, grad_loss), None  # for half_to_float
