"""``xentropy_cuda``: softmax cross-entropy, forward and backward.

A module of compiled Apex. Arguments are positional only; any device, every floating dtype.
"""

import torch

import apex
from apex.ops._check import check_shape
from apex.ops.losses import cross_entropy as ops

__all__ = ["backward", "forward"]

__version__ = apex.__version__


@torch.no_grad()
def forward(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, half_to_float: bool, /
) -> list[torch.Tensor]:
    """Compute ``[losses, logsumexp]`` of each row, float32 (float64 for float64 logits).

    ``half_to_float`` changes nothing: a logarithm rounded to 16 bits, which it let the caller
    avoid, was of no use to ``backward``.
    """
    name = "xentropy_cuda.forward"
    ops.check(name, logits, labels, float(smoothing))
    ops.check_labels(name, labels, logits.shape[1], ops.NO_PADDING)
    return list(ops.OP.operator(logits, labels, float(smoothing), ops.NO_PADDING))


@torch.no_grad()
def backward(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    max_log_sum_exp: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float,
    /,
) -> torch.Tensor:
    """Compute the gradient of the logits, in their dtype."""
    name = "xentropy_cuda.backward"
    ops.check(name, logits, labels, float(smoothing))
    ops.check_labels(name, labels, logits.shape[1], ops.NO_PADDING)
    for key, tensor in (("grad_loss", grad_loss), ("max_log_sum_exp", max_log_sum_exp)):
        check_shape(name, key, tensor, labels.shape, f"labels {list(labels.shape)}")
    saved = (logits, labels, max_log_sum_exp, float(smoothing), ops.NO_PADDING)
    found: torch.Tensor = ops.OP.backward_operator(grad_loss, [True], *saved)
    return found
