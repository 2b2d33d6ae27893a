"""``SoftmaxCrossEntropyLoss``: one loss for each row of logits, label smoothing included."""

from apex.ops._function import Applied
from apex.ops.losses import cross_entropy as ops


class SoftmaxCrossEntropyLoss(Applied):
    """Cross-entropy with label smoothing, to be called by ``apply``; no reduction.

    ``SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing=0.0, padding_idx=0,
    half_to_float=False)``: logits ``(rows, classes)`` of any floating dtype, labels ``(rows,)`` of
    any integer dtype; losses ``(rows,)`` in float32 (float64 for float64). Formula, errors and what
    runs where: :mod:`apex.ops.losses.cross_entropy`.

    **Class 0 is ignored by default**, as in NVIDIA's Apex: rows with the label ``padding_idx``, 0,
    have loss 0 and gradient 0. If 0 is one of your classes, pass a ``padding_idx`` that is no
    label, such as -100. ``half_to_float`` has no effect: losses are always float32, and gradients
    have the logits' dtype.

    Options may be passed by keyword, but ``torch.jit.script`` takes none.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
        >>> SoftmaxCrossEntropyLoss.apply(logits, torch.tensor([1, 0]))
        tensor([0.6931, 0.0000])
    """

    function = staticmethod(ops.losses)
    gradient = "grad_loss"
