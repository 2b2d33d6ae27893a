"""Old name of NVIDIA's Apex: causal softmax of scaled attention scores.

A module of compiled Apex. Arguments are positional only; any device, every floating dtype, any
number of positions.
"""

import torch

import apex
from apex.ops.layers import scaled_softmax as ops

__all__ = ["backward", "forward"]

__version__ = apex.__version__


def forward(input: torch.Tensor, scale_factor: float, /) -> torch.Tensor:
    """Softmax of ``scale_factor * input``, ``(..., positions, positions)``; 0 above a diagonal."""
    return ops.forward(__name__, input, None, scale_factor, causal=True)


def backward(
    output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float, /
) -> torch.Tensor:
    """Gradient of the input, written over ``output_grads`` and returned."""
    return ops.backward(__name__, output_grads, softmax_results, scale_factor, causal=True)
