"""``SoftmaxCrossEntropyLoss``: one loss for each row of logits, label smoothing included."""

from __future__ import annotations

from typing import Any

import torch

from apex.ops import cross_entropy as ops

__all__ = ["SoftmaxCrossEntropyLoss"]


class _Chosen(torch.autograd.Function):
    """``apply`` alone, which TorchScript would compile if it were in the class itself."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Compute the losses; arguments as those of ``forward`` after ``ctx``."""
        if cls is not SoftmaxCrossEntropyLoss:
            return super().apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return _apply(*args, **kwargs)

    # TorchScript would not take a list of any length.
    apply.__func__.__annotations__.clear()  # type: ignore[attr-defined]


class SoftmaxCrossEntropyLoss(_Chosen):
    """Cross-entropy with label smoothing, to be called by ``apply``; no reduction.

    ``SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing=0.0, padding_idx=0,
    half_to_float=False)``: logits ``(rows, classes)`` of any floating dtype, labels ``(rows,)`` of
    any integer dtype; losses ``(rows,)`` in float32 (float64 for float64). Formula, errors and what
    runs where: :mod:`apex.ops.cross_entropy`.

    **Rows with label 0 are left out unless another** ``padding_idx`` **is given**, -1 for instance:
    the default is the original's. ``half_to_float`` is taken and changes nothing: losses are always
    float32, and gradients have the logits' dtype.

    Keywords work too. By torch's rules for autograd functions ``torch.compile`` wants all options
    before them (and takes none before torch 2.13), and ``torch.jit.script`` takes none.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
        >>> SoftmaxCrossEntropyLoss.apply(logits, torch.tensor([1, 0]))
        tensor([0.6931, 0.0000])
    """

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


def _apply(
    logits: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float = 0.0,
    padding_idx: int = 0,
    half_to_float: bool = False,
) -> torch.Tensor:
    """Let the operation choose: torch's own functions are cheaper for a few logits."""
    return ops.cross_entropy(logits, labels, smoothing=smoothing, padding_idx=padding_idx)
