"""Splitting the last dimension and the vocabulary between ranks."""

from collections.abc import Sequence

import torch

from apex.ops._check import ArgumentError
from apex.transformer.utils import divide


def split(tensor: torch.Tensor, parts: int, dim: int) -> Sequence[torch.Tensor]:
    """Split a dimension into equal views. Raise ``ArgumentError`` if there is a remainder."""
    if tensor.dim() == 0 or parts < 1 or tensor.shape[dim] % parts:
        raise ArgumentError(
            f"dimension {dim} of a tensor of shape {list(tensor.shape)} is not divisible into "
            f"{parts} parts."
        )
    return torch.tensor_split(tensor, parts, dim)


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Split the last dimension into equal parts, which are views or contiguous copies.

    Raises:
        ArgumentError: The size is not divisible by ``num_partitions``.
    """
    parts = split(tensor, num_partitions, -1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class VocabUtility:
    """Range of token ids of a rank, from ``first`` to ``last - 1``."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the range for a number of rows on each rank."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the range for a number of rows on all ranks together.

        Raises:
            AssertionError: The number is not divisible by the number of ranks.
        """
        size = divide(global_vocab_size, world_size)
        return rank * size, (rank + 1) * size
