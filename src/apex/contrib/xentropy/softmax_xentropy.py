"""``SoftmaxCrossEntropyLoss``: one loss for each row of logits, label smoothing included."""

from apex.ops._function import Applied
from apex.ops.losses import cross_entropy as ops


class SoftmaxCrossEntropyLoss(Applied):
    """Cross-entropy with label smoothing and without reduction. Call its ``apply``.

    ``SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing=0.0, padding_idx=0,
    half_to_float=False)`` computes the losses ``(rows,)`` in float32 (float64 for float64). Logits
    are ``(rows, classes)`` in any floating dtype, labels ``(rows,)`` in any integer dtype. The
    docstring of :mod:`apex.ops.losses.cross_entropy` has the formula and the errors.

    **Class 0 is ignored by default**, as in NVIDIA's Apex: rows with the label ``padding_idx``
    (0 by default) have loss 0 and gradient 0. If 0 is one of your classes, pass a ``padding_idx``
    that is not a label, such as -100. ``half_to_float`` has no effect: losses are always float32,
    and gradients have the logits' dtype.

    You can pass options by keyword, but not in ``torch.jit.script``.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
        >>> SoftmaxCrossEntropyLoss.apply(logits, torch.tensor([1, 0]))
        tensor([0.6931, 0.0000])
    """

    function = staticmethod(ops.losses)
    gradient = "grad_loss"
