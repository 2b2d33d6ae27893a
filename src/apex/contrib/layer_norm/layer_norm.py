"""`FastLayerNorm`: layer norm over the last dimension, of any size.

The output has the weight's dtype: a float32 input may meet 16-bit weights. NVIDIA's takes certain
hidden sizes only, on a GPU only.
"""

from typing import Any

import torch

from apex.ops import _rows, _scripted
from apex.ops.layer_norm import layer_norm

__all__ = ["FastLayerNorm", "FastLayerNormFN"]

MIXED = "apex.normalization.MixedFusedLayerNorm"


class FastLayerNormFN(torch.autograd.Function):
    """Layer norm, called by ``.apply``; autocast does not matter here."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor,
        epsilon: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        shape = gamma.shape
        _rows.check("FastLayerNormFN", x, gamma, beta, shape)
        _rows.refuse_wider_weight(x, gamma, MIXED)
        return _rows.save_and_run(
            ctx, x, gamma, beta, shape, epsilon, gamma.dtype, True, memory_efficient
        )

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # noqa: D102
        wanted = any(ctx.needs_input_grad[1:3])
        return (*_rows.run_saved(ctx, dy, wanted), None, None)


@_scripted.left_to_python
def _fast_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    epsilon: float,
    memory_efficient: bool,
) -> torch.Tensor:
    x, weight, bias = _rows.narrowed(x, weight, bias)
    _rows.refuse_wider_weight(x, weight, MIXED)
    return layer_norm(
        x, weight, bias, weight.shape, epsilon, memory_efficient=memory_efficient,
        dtype=weight.dtype,
    )  # fmt: skip


class FastLayerNorm(torch.nn.Module):
    """Layer norm over the last dimension.

    Args:
        hidden_size: Of the last dimension.
        eps: Added to the variance.
        memory_efficient: Keep the output for the backward, not the input.

    Example:
        >>> FastLayerNorm(4)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([-1.3416, -0.4472,  0.4472,  1.3416], grad_fn=<_RowsBackward>)
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = torch.nn.Parameter(torch.empty(hidden_size))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        torch.nn.init.ones_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(..., hidden_size)`` to the same shape."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            shape = self.weight.shape
            return _scripted.layer_norm(x, self.weight, self.bias, shape, self.epsilon, True)
        return _fast_layer_norm(x, self.weight, self.bias, self.epsilon, self.memory_efficient)
