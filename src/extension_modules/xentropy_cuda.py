"""Old name of NVIDIA's Apex: softmax cross-entropy, forward and backward.

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
    losses, sums = ops.OP.operator(logits, labels, float(smoothing), ops.NO_PADDING)
    return [losses, sums[:, 0].contiguous()]


@torch.no_grad()
def backward(
    grad_loss: torch.Tensor,
    logits: torch.Tensor,
    max_log_sum_exp: torch.Tensor,
    labels: torch.Tensor,
    smoothing: float,
    /,
) -> torch.Tensor:
    """Compute the gradient of the logits, in their dtype; on a GPU they are read twice.

    ``max_log_sum_exp`` does not give the sum of the probabilities that are not the label's.
    """
    name = "xentropy_cuda.backward"
    ops.check(name, logits, labels, float(smoothing))
    ops.check_labels(name, labels, logits.shape[1], ops.NO_PADDING)
    for key, tensor in (("grad_loss", grad_loss), ("max_log_sum_exp", max_log_sum_exp)):
        check_shape(name, key, tensor, labels.shape, f"labels {list(labels.shape)}")
    sums = torch.stack([max_log_sum_exp, torch.zeros_like(max_log_sum_exp)], 1)
    if ops.OP.implementation(logits) is not ops.OP.pieces:  # which find it themselves
        sums[:, 1] = ops.OP.operator(logits, labels, 0.0, ops.NO_PADDING)[1][:, 1]
    saved = (logits, labels, sums, float(smoothing), ops.NO_PADDING)
    found: torch.Tensor = ops.OP.backward_operator(grad_loss, [True], *saved)
    return found
