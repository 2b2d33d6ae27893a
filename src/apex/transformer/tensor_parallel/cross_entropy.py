"""Cross entropy of logits whose classes are spread over the ranks.

Each rank has ``V / ranks`` classes. Two all-reduces join them, of a few numbers for each token: the
largest logit; then the sum of the other classes' exponentials, the target's logit and exponential
and, with label smoothing, the sum of all logits. What is kept for the backward, which needs no
collective, is the gradient for a loss of 1. At the target it is a sum of the other probabilities:
near probability 1 a difference would cancel.
"""

from typing import Any

import torch

from apex.ops._check import ArgumentError, check_tensors
from apex.ops._dtypes import wide
from apex.transformer import parallel_state

dist = torch.distributed


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, smoothing: float
    ) -> torch.Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        classes = logits.shape[-1]
        target = target - parallel_state.get_tensor_model_parallel_rank() * classes

        x = logits.to(wide(logits))
        largest = x.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        x = x - largest.unsqueeze(-1)

        elsewhere = (target < 0) | (target >= classes)
        index = target.masked_fill(elsewhere, 0).unsqueeze(-1)
        sums = [x.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0.0)]
        if smoothing:
            sums.append(x.sum(-1))
        slope = x.exp_()
        found = slope.gather(-1, index)
        hit = ~elsewhere.unsqueeze(-1)
        slope.scatter_(-1, index, found.masked_fill(hit, 0.0))
        joined = torch.stack([slope.sum(-1), *sums, (found * hit).squeeze(-1)])
        dist.all_reduce(joined, group=group)
        total = joined[0] + joined[-1]
        log_sum = total.log()
        loss = log_sum - joined[1]
        each = smoothing / (classes * parallel_state.get_tensor_model_parallel_world_size())
        if smoothing:
            loss.mul_(1.0 - smoothing).add_(smoothing * log_sum - each * joined[2])

        slope.div_(total.unsqueeze(-1))
        if smoothing:
            slope.sub_(each)
        of_target = (smoothing - each - joined[0] / total).unsqueeze(-1)
        slope.scatter_(-1, index, of_target.where(hit, slope.gather(-1, index)))
        ctx.save_for_backward(slope)
        ctx.dtype = logits.dtype
        return loss.to(logits.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (slope,) = ctx.saved_tensors
        return (slope * dy.unsqueeze(-1)).to(ctx.dtype), None, None


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return the loss of each token, equal on all ranks of the tensor-parallel group.

    With ``label_smoothing=a`` the target's probability is ``1 - a``, and that of each of the other
    ``V - 1`` classes is ``a / (V - 1)``. The equivalent ``label_smoothing`` of torch is
    ``a * V / (V - 1)``. The loss is computed in float32 (float64 for float64) and rounded once.

    Args:
        vocab_parallel_logits: Logits of this rank's classes, ``(..., V / ranks)``.
        target: Class of each token, integers ``(...)``, equal on all ranks. Mask the loss of
            targets outside of 0 to ``V - 1``, such as -1 for padding: it is finite but meaningless.
        label_smoothing: ``a``, at least 0 and below 1.

    Returns:
        ``(...)``, in the dtype of the logits.

    Raises:
        ArgumentError: Shapes or dtypes do not match, or ``label_smoothing`` is out of range.

    Source: Shoeybi et al., Megatron-LM (2019), section 3.
    """
    name, logits = "vocab_parallel_cross_entropy", vocab_parallel_logits
    tensors = {"vocab_parallel_logits": logits, "target": target}
    floating, integers = list(tensors)
    check_tensors(name, tensors, floating=[floating], integers=[integers], required=tensors)
    if logits.dim() == 0 or logits.shape[:-1] != target.shape:
        raise ArgumentError(
            f"{name}: vocab_parallel_logits has shape {list(logits.shape)} and target "
            f"{list(target.shape)}. Pass (..., classes / ranks) and (...)."
        )
    classes = logits.shape[-1] * parallel_state.get_tensor_model_parallel_world_size()
    if not 0.0 <= label_smoothing < 1.0 or (label_smoothing and classes < 2):
        raise ArgumentError(
            f"{name}: label_smoothing is {label_smoothing} with {classes} classes; pass 0.0 to "
            "below 1.0, and 0.0 for a single class."
        )
    share = label_smoothing * classes / max(1, classes - 1)
    loss: torch.Tensor = _VocabParallelCrossEntropy.apply(logits, target.long(), share)  # type: ignore[no-untyped-call]
    return loss
