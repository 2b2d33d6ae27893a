"""`FastLayerNorm`: layer norm over the last dimension, of any size.

The output has the weight's dtype: a float32 input may meet 16-bit weights. NVIDIA's takes certain
hidden sizes only, on a GPU only.
"""

import torch

from apex.ops._function import Applied
from apex.ops.norms import _scripted
from apex.ops.norms.row_norms import norm

_INSTEAD = "apex.normalization.MixedFusedLayerNorm"


@_scripted.left_to_python
def _fast_layer_norm(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float,
    memory_efficient: bool = False,
) -> torch.Tensor:
    return norm(x, gamma, beta, gamma.shape, epsilon, memory_efficient, True, "half", _INSTEAD)


class FastLayerNormFN(Applied):
    """Layer norm, called by ``.apply``; autocast does not matter here."""

    function = staticmethod(_fast_layer_norm)
    gradient = "dy"


class FastLayerNorm(torch.nn.Module):
    """Layer norm over the last dimension.

    Args:
        hidden_size: Size of the last dimension.
        eps: Added to the variance.
        memory_efficient: Keep the output for the backward pass instead of the input.

    Example:
        >>> FastLayerNorm(4)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([-1.3416, -0.4472,  0.4472,  1.3416], grad_fn=<NativeLayerNormBackward0>)
    """

    # What modules that an older Apex pickled whole may lack.
    epsilon, memory_efficient = 1e-5, False

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=None, dtype=None))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=None, dtype=None))
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
        weight = self.weight
        return norm(
            x, weight, self.bias, weight.shape, self.epsilon, self.memory_efficient, True, "half",
            _INSTEAD,
        )  # fmt: skip
