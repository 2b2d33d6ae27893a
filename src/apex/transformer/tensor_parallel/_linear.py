"""The product of a linear layer, and a backward whose collective overlaps with computing.

The collective of the input's gradient runs while the weight's gradient is computed. With a sequence
in parts the gathered input is not kept for the backward, but gathered again, during the product for
the input's gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F

from apex.ops import _runtime
from apex.ops._check import ArgumentError
from apex.ops._dtypes import to_dtype, wide
from apex.ops.layers import dense
from apex.transformer import parallel_state
from apex.transformer.tensor_parallel import mappings


def _add_to_main_grad(weight: Any, dy: torch.Tensor, x: torch.Tensor) -> None:
    total = getattr(weight, "main_grad", None)
    if not isinstance(total, torch.Tensor):
        raise ArgumentError(
            "gradient_accumulation_fusion: the weight has no main_grad. Set weight.main_grad = "
            "torch.zeros_like(weight, dtype=torch.float32) before the backward."
        )
    allowed = {wide(x), dy.dtype}
    if total.dtype not in allowed or total.shape != weight.shape or not total.is_contiguous():
        raise ArgumentError(
            f"gradient_accumulation_fusion: main_grad is {total.dtype} of shape "
            f"{list(total.shape)}; pass a contiguous main_grad of shape {list(weight.shape)}, of "
            f"{' or '.join(sorted(map(str, allowed)))}."
        )
    dense.add_product(total, dense.rows(dy), dense.rows(x))


class LinearWithGradAccumulationAndAsyncCommunication(torch.autograd.Function):
    """Autograd function of :func:`linear_with_grad_accumulation_and_async_allreduce`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        async_grad_allreduce: bool,
        sequence_parallel_enabled: bool,
    ) -> torch.Tensor:
        """Multiply, after gathering the sequence if it is divided."""
        ctx.save_for_backward(input, weight)
        ctx.weight = weight  # has main_grad; a saved tensor may come back as another object
        ctx.fused, ctx.reduced = gradient_accumulation_fusion, async_grad_allreduce
        ctx.gathered, ctx.bias = sequence_parallel_enabled, None if bias is None else bias.dtype
        whole = mappings.gather(input)[0] if sequence_parallel_enabled else input
        return F.linear(whole, weight.to(input.dtype), to_dtype(bias, input.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Start the collective of the input's gradient, and compute the weight's meanwhile."""
        with dense.alone(grad_output):  # backward() may be called under autocast
            return _backward(ctx, grad_output, *ctx.saved_tensors)


def _backward(ctx: Any, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dx: Any = None
    work = dw = db = None
    if ctx.gathered and needs_weight:
        x, work = mappings.gather(x, asynchronous=True)
    if needs_x:
        dx = dense.input_gradient(dy, weight.to(dy.dtype))
    if work is not None:
        work.wait()
    if needs_x and ctx.gathered:
        dx, work = mappings.reduce_scatter(dx, asynchronous=True)
    elif needs_x and ctx.reduced:
        group = parallel_state.get_tensor_model_parallel_group()
        work = torch.distributed.all_reduce(dx, group=group, async_op=True)
    if needs_weight and ctx.fused:
        _add_to_main_grad(ctx.weight, dy, x)
    elif needs_weight:
        dw = (dense.rows(dy).t() @ dense.rows(x)).to(weight.dtype)
    if needs_bias:
        db = dense.rows(dy).sum(0).to(ctx.bias)
    if work is not None:
        work.wait()
    return dx, dw, db, None, None, None


def linear_with_grad_accumulation_and_async_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
) -> torch.Tensor:
    """Return ``input @ weight.T + bias``, under ``torch.autocast`` in its dtype.

    Args:
        input: ``(sequence, ..., in)``. With ``sequence_parallel_enabled`` it is this rank's part of
            the sequence.
        weight: ``(out, in)``.
        bias: ``(out,)`` or None.
        gradient_accumulation_fusion: Add the weight's gradient to ``weight.main_grad``, which is
            float32 or has the output's dtype, instead of returning it to autograd.
        async_grad_allreduce: Add up the input's gradients over ranks in the backward pass.
        sequence_parallel_enabled: Gather the sequence before the product.

    Raises:
        ArgumentError: Shapes or dtypes do not match, or the last two arguments are both true. In
            the backward pass: ``main_grad`` is missing or does not match.
    """
    name = "linear_with_grad_accumulation_and_async_allreduce"
    if async_grad_allreduce and sequence_parallel_enabled:
        raise ArgumentError(
            f"{name}: async_grad_allreduce and sequence_parallel_enabled both reduce the input's "
            "gradient; pass only one of them."
        )
    dense.check(name, input, {"weight": weight}, {"bias": bias})
    kind = input.device.type
    if _runtime.autocasts(kind) and input.dtype != torch.float64:
        input = input.to(torch.get_autocast_dtype(kind))
    several = parallel_state.get_tensor_model_parallel_world_size() > 1
    flags = async_grad_allreduce and several, sequence_parallel_enabled and several
    with _runtime.without_autocast(kind):
        product: torch.Tensor = LinearWithGradAccumulationAndAsyncCommunication.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, gradient_accumulation_fusion, *flags
        )
    return product
