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

    The docstring of :mod:`apex.ops.losses.focal_loss` has the formula. Apart from the logits, the
    backward pass stores nothing of their size.

    Args:
        cls_output: Logits ``(..., columns)``, in any floating dtype.
        cls_targets_at_level: Integers ``(...)``: the class of each anchor, -1 for background, -2
            for anchors that do not count.
        num_positive_sum: Divisor of the sum, a tensor of one element on the same device.
        num_real_classes: Number of classes. Further columns are padding and do not count.
        alpha: Weight of an anchor's class. Every other class has the weight ``1 - alpha``.
        gamma: Exponent, at least 0, that reduces the weight of easy examples.
        label_smoothing: Targets are ``1 - label_smoothing / 2`` and ``label_smoothing / 2``.

    Returns:
        0-dim tensor in float32, or float64 for float64 logits.

    Raises:
        ArgumentError: An argument has an unsupported type, dtype, shape, device or value. It is a
            RuntimeError, TypeError and ValueError.
        IndexError: A target is out of range, on a CPU. On other devices the loss is NaN.

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
