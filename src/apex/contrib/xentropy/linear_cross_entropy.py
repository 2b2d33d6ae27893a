"""Cross-entropy of a linear layer whose outputs are never all in memory."""

from typing import Literal

import torch

from apex.ops.losses import linear_cross_entropy as ops
from apex.ops.norms._scripted import left_to_python

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy"]

Reduction = Literal["none", "mean", "sum"]


def linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,  # not for torch.jit.script: take LinearCrossEntropyLoss there, or torch.compile
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute ``F.cross_entropy(F.linear(input, weight, bias).float(), targets)`` in pieces.

    The logits are made for ``chunk_size`` rows at a time, so that from 4,096 rows on a forward and
    backward pass needs less than a seventh of the memory.
    :mod:`apex.ops.losses.linear_cross_entropy` says how. For gradients of gradients and for float64
    all logits are made at once. On a CPU and on ROCm the gradient of a 16-bit weight also takes
    float32 copies of a piece's input and of 4,096 columns of its logits; with torch 2.9 on CUDA a
    float32 product of 4,096 rows of the weight.

    Args:
        input: ``(..., features)``.
        weight: ``(classes, features)``; may be tied to an embedding.
        targets: ``(...)``, class numbers of any integer dtype.
        bias: ``(classes,)`` or ``None``.
        ignore_index: Target of rows that do not count.
        label_smoothing: Fraction of the target that is spread evenly over all classes.
        reduction: ``"mean"`` over the rows that count (nan if none does), ``"sum"``, or ``"none"``.
        chunk_size: Rows at a time; by default an eighth of them, but at least 1,024, in whole tiles
            of 128 rows and at most 2**28 logits (512 MiB in 16 bits).

    Returns:
        0-dim, or ``(...)`` for ``"none"``; float32, or float64 for float64 input.

    Raises:
        ArgumentError: A dtype, shape, device or option is not what it should be, or dtypes differ
            outside of autocast. It is a TypeError, a ValueError and a RuntimeError.
        IndexError: A target is out of range, on the CPU; on a device the loss is nan, or torch's
            own function stops with an assertion there.

    Example:
        >>> hidden, weight = torch.zeros(2, 3), torch.zeros(4, 3)
        >>> linear_cross_entropy(hidden, weight, torch.tensor([1, 3]))
        tensor(1.3863)
    """
    return ops.linear_cross_entropy(
        input,
        weight,
        targets,
        bias,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
        chunk_size=chunk_size,
    )


class LinearCrossEntropyLoss(torch.nn.Module):
    """A classifier's last layer together with its loss; see :func:`linear_cross_entropy`.

    The weights are those of ``linear``, an ordinary ``torch.nn.Linear``. Call it where you need the
    logits. Names and order of arguments are those of ``torch.nn``'s class of this
    name.

    Args:
        in_features: Size of the last dimension of the input.
        num_classes: Number of classes.
        bias: Whether the layer has a bias.
        device: Where its weights are.
        dtype: Of its weights.
        reduction: As for the function.
        ignore_index: As for the function.
        label_smoothing: As for the function.
        chunk_size: As for the function.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(
            in_features, num_classes, bias=bias, device=device, dtype=dtype
        )
        self.reduction: Reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.chunk_size = chunk_size

    @left_to_python
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Map ``(..., in_features)`` and ``(...)`` to the loss."""
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            self.linear.bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            chunk_size=self.chunk_size,
        )

    def extra_repr(self) -> str:
        """Show the options in ``print(model)``."""
        return (
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, "
            f"label_smoothing={self.label_smoothing}, chunk_size={self.chunk_size}"
        )
