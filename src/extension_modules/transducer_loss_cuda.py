"""Old name of NVIDIA's Apex: the loss of an RNN transducer and its gradient, without autograd.

A module of compiled Apex. Arguments are positional only; what they mean is said at
:class:`apex.contrib.transducer.TransducerLoss`, but ``x`` are logarithms of probabilities: the
log-softmax of the logits. ``opt`` has no effect.
"""

import torch

from apex.ops._dtypes import wide
from apex.ops.losses import transducer as ops

__all__ = ["backward", "forward"]

Tensor = torch.Tensor


@torch.no_grad()
def forward(
    x: Tensor, label: Tensor, fLen: Tensor, yLen: Tensor, batchOffset: Tensor, maxFLen: int,
    blankIdx: int, opt: int, packedInput: bool, /,
) -> list[Tensor]:  # fmt: skip
    """Compute ``[alpha, beta, losses]``, the losses in the dtype of x."""
    packed = (batchOffset, maxFLen) if packedInput else None
    name = "transducer_loss_cuda.forward"
    rows, cells, labels = ops.loss_rows(name, x, label, fLen, yLen, blankIdx, packed)
    lse = torch.zeros_like(labels, dtype=wide(x))
    alpha, beta, losses = ops.alignments(rows, labels, lse, cells, blankIdx)
    return [alpha.to(lse.dtype), beta.to(lse.dtype), losses.to(x.dtype)]


@torch.no_grad()
def backward(  # noqa: PLR0913
    x: Tensor, lossGrad: Tensor, alpha: Tensor, beta: Tensor, fLen: Tensor, yLen: Tensor,
    label: Tensor, batchOffset: Tensor, maxFLen: int, blankIdx: int, opt: int,
    fuseSoftmaxBackward: bool, packedInput: bool, /,
) -> Tensor:  # fmt: skip
    """Compute the gradient of x; of the logits with ``fuseSoftmaxBackward``."""
    packed = (batchOffset, maxFLen) if packedInput else None
    name = "transducer_loss_cuda.backward"
    rows, cells, labels = ops.loss_rows(name, x, label, fLen, yLen, blankIdx, packed)
    lse, losses = torch.zeros_like(labels, dtype=wide(x)), ops.losses_of(beta, cells)
    known = (rows, labels, lse, (alpha, beta, losses), cells, blankIdx)
    return ops.gradient(lossGrad, *known, of_logits=fuseSoftmaxBackward).view(x.shape)
