"""``focal_loss`` and ``FocalLoss``: of sigmoids, over all anchors and classes."""

import torch

from apex.ops._function import Applied
from apex.ops.losses import focal_loss as ops
from apex.ops.norms._scripted import left_to_python


@left_to_python
def focal_loss(
    cls_output: torch.Tensor, cls_targets_at_level: torch.Tensor, num_positive_sum: torch.Tensor,
    num_real_classes: int, alpha: float, gamma: float, label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Compute the focal loss of all anchors, divided by the number of positive ones.

    Formula and what happens to targets out of range: :mod:`apex.ops.losses.focal_loss`. Nothing of
    the size of the logits is stored for the backward but the logits themselves.

    Args:
        cls_output: Logits ``(..., columns)``, any floating dtype.
        cls_targets_at_level: ``(...)``, any integer dtype: the class of each anchor, -1 for
            background, -2 for anchors that do not count.
        num_positive_sum: One number, by which the sum is divided, on the same device.
        num_real_classes: Columns from this one on are padding: they do not count.
        alpha: Weight of an anchor's class; every other class has ``1 - alpha``.
        gamma: Power, from 0 on, with which easy examples are weighted down.
        label_smoothing: Targets are ``1 - label_smoothing / 2`` and ``label_smoothing / 2``.

    Returns:
        0-dim; float32, or float64 for float64 logits.

    Raises:
        ArgumentError: A type, dtype, shape, device or number is not what it should be; it is a
            RuntimeError, TypeError and ValueError.
        IndexError: A target is out of range, on a CPU. Elsewhere the loss is nan.

    Example:
        >>> logits, targets = torch.zeros(2, 3), torch.tensor([1, -1])
        >>> focal_loss(logits, targets, torch.tensor([1.0]), 3, alpha=0.25, gamma=2.0)
        tensor(0.6931)
    """
    return ops.focal_loss(
        cls_output, cls_targets_at_level, num_positive_sum, num_real_classes, alpha, gamma,
        label_smoothing,
    )  # fmt: skip


class FocalLoss(Applied):
    """:func:`focal_loss` as an autograd function, to be called by ``apply``."""

    function = staticmethod(ops.focal_loss)
    gradient = "grad_loss"


# In the package this name hides the module, by which programs know it: `focal_loss.focal_loss()`.
focal_loss.focal_loss = focal_loss  # type: ignore[attr-defined]
focal_loss.FocalLoss = FocalLoss  # type: ignore[attr-defined]
