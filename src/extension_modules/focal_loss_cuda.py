"""Old name of NVIDIA's Apex: focal loss, forward and backward.

A module of compiled Apex. Arguments are positional only; any device, every floating dtype, any
number of classes.
"""

import torch

from apex.ops._check import check_shape, check_tensors
from apex.ops.losses.focal_loss import OP, checked

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(
    cls_output: torch.Tensor,
    cls_targets_at_level: torch.Tensor,
    num_positives_sum: torch.Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    smoothing_factor: float,
    /,
) -> list[torch.Tensor]:
    """Compute ``[loss, partial_grad]``.

    ``partial_grad`` is the gradient of ``loss * num_positives_sum`` in the dtype of the logits.
    """
    logits, targets, total, *numbers = checked(
        "focal_loss_cuda.forward", cls_output, cls_targets_at_level, num_positives_sum,
        num_real_classes, alpha, gamma, smoothing_factor,
    )  # fmt: skip
    loss = OP.operator(logits, targets, total, *numbers)
    one = torch.ones_like(loss)
    return [loss, OP.backward_operator(one, [True], logits, targets, one, *numbers)]


@torch.no_grad()
def backward(
    grad_output: torch.Tensor, partial_grad: torch.Tensor, num_positives_sum: torch.Tensor, /
) -> torch.Tensor:
    """Scale ``partial_grad`` by ``grad_output / num_positives_sum`` in place, and return it."""
    name = "focal_loss_cuda.backward"
    tensors = {"partial_grad": partial_grad, "grad_output": grad_output}
    numbers = {"grad_output": grad_output, "num_positives_sum": num_positives_sum}
    check_tensors(name, tensors | numbers, floating=tensors, required=tensors | numbers)
    for key, number in numbers.items():
        check_shape(name, key, number.reshape(-1), (1,), "is one number")
    return partial_grad.mul_((grad_output / num_positives_sum).reshape(()))
