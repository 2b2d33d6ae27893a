"""Cross-entropy losses of logits, and of a linear layer that computes the logits."""

from apex.contrib.xentropy.linear_cross_entropy import (
    LinearCrossEntropyLoss,
    linear_cross_entropy,
    linear_log_probs,
)
from apex.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = [
    "LinearCrossEntropyLoss",
    "SoftmaxCrossEntropyLoss",
    "linear_cross_entropy",
    "linear_log_probs",
]
