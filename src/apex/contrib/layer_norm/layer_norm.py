"""`FastLayerNorm`: layer norm over the last dimension, of any size.

The output has the weight's dtype: a float32 input may meet 16-bit weights. NVIDIA's takes certain
hidden sizes only, on a GPU only.
"""

from typing import Any

import torch

from apex.normalization._functions import FusedLayerNormAffineMixedDtypesFunction
from apex.ops._check import refuse_wider_weight
from apex.ops.norms import _scripted
from apex.ops.norms.row_norms import OP, layer_norm

__all__ = ["FastLayerNorm", "FastLayerNormFN"]

MIXED = "apex.normalization.MixedFusedLayerNorm"


class FastLayerNormFN(FusedLayerNormAffineMixedDtypesFunction):
    """Layer norm, called by ``.apply``; autocast does not matter here."""

    @staticmethod
    def forward(  # type: ignore[override]  # noqa: D102
        ctx: Any,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor,
        epsilon: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        refuse_wider_weight(x, gamma, MIXED)
        return FusedLayerNormAffineMixedDtypesFunction.forward(
            ctx, x, gamma, beta, gamma.shape, epsilon, memory_efficient
        )


@_scripted.left_to_python
def _fast_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    epsilon: float,
    memory_efficient: bool,
) -> torch.Tensor:
    x, weight, bias = OP.cast(x, weight, bias)
    refuse_wider_weight(x, weight, MIXED)
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
        tensor([-1.3416, -0.4472,  0.4472,  1.3416], grad_fn=<NativeLayerNormBackward0>)
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
