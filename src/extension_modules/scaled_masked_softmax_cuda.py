"""Old name of NVIDIA's Apex: softmax of scaled attention scores with a mask.

A module of compiled Apex. Arguments are positional only; any device, every floating dtype, any
number of queries and keys.
"""

import torch

import apex
from apex.ops._check import check_tensors
from apex.ops.layers import scaled_softmax as ops

__all__ = ["backward", "forward", "get_batch_per_block"]

__version__ = apex.__version__


def forward(input: torch.Tensor, mask: torch.Tensor, scale_factor: float, /) -> torch.Tensor:
    """Softmax of ``scale_factor * input`` over the keys, without those whose ``mask`` is 1.

    Args:
        input: ``(batch, heads, queries, keys)``.
        mask: ``(batch, 1, queries, keys)``, or 1 for any of the sizes; bool or uint8.
        scale_factor: A number.
    """
    check_tensors(
        f"{__name__}.forward", {"input": input, "mask": mask}, floating=(), required=["mask"]
    )
    return ops.forward(__name__, input, mask, scale_factor)


def backward(
    output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float, /
) -> torch.Tensor:
    """Gradient of the input, written over ``output_grads`` and returned."""
    return ops.backward(__name__, output_grads, softmax_results, scale_factor)


def get_batch_per_block(
    query_seq_len: int, key_seq_len: int, batches: int, attn_heads: int, /
) -> int:
    """How many rows a block of Apex's kernel took: the number of keys alone decides."""
    return ops.batches_per_block(key_seq_len)
