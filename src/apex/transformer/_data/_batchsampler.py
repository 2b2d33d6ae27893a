"""Indices of each rank's batches, from the samples that training has not used yet.

A global batch is ``local_minibatch_size * data_parallel_size`` samples. Samplers go to
``torch.utils.data.DataLoader(dataset, batch_sampler=...)``. ``local_minibatch_size`` may be set
between batches, for batches that grow. ``len()`` is the number of samples, as in Megatron, not of
batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from apex.ops._check import ArgumentError


class _Sampler(ABC):
    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        name = type(self).__name__
        if total_samples <= 0:
            raise ArgumentError(
                f"{name}: total_samples is {total_samples}, so there is no sample to consume. Pass "
                "1 or more."
            )
        if consumed_samples < 0:
            raise ArgumentError(f"{name}: consumed_samples is {consumed_samples}; pass 0 or more.")
        if data_parallel_size <= 0 or not 0 <= data_parallel_rank < data_parallel_size:
            raise ArgumentError(
                f"{name}: data_parallel_rank is {data_parallel_rank} of data_parallel_size "
                f"{data_parallel_size}; pass a size of 1 or more, and a rank from 0 to size - 1."
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.local_minibatch_size = local_minibatch_size

    def __len__(self) -> int:
        return self.total_samples

    @property
    def local_minibatch_size(self) -> int:
        """Samples of one rank's batch."""
        return self._local_minibatch_size

    @local_minibatch_size.setter
    def local_minibatch_size(self, size: int) -> None:
        if size <= 0:
            raise ArgumentError(
                f"{type(self).__name__}: local_minibatch_size is {size}; pass a positive number."
            )
        self._local_minibatch_size = size
        self.local_minibatch_times_data_parallel_size = size * self.data_parallel_size

    @abstractmethod
    def __iter__(self) -> Iterator[list[int]]: ...


class MegatronPretrainingSampler(_Sampler):
    """Yield this rank's part of each global batch, in the order of the dataset.

    Args:
        total_samples: Number of samples of the dataset.
        consumed_samples: Number of samples that were used already. Set it when you resume.
        local_minibatch_size: Number of samples in one rank's batch.
        data_parallel_rank: Data-parallel rank of this process.
        data_parallel_size: Number of ranks with different samples.
        drop_last: Drop a last, smaller global batch. Otherwise its first samples go to the first
            rank, and the last ranks may get fewer samples, or an empty list.

    Raises:
        ArgumentError: No sample is left, or a number is out of range. It is a RuntimeError,
            TypeError and ValueError.

    Example:
        >>> list(MegatronPretrainingSampler(10, 2, 2, data_parallel_rank=1, data_parallel_size=2))
        [[4, 5], [8, 9]]
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        sizes = (local_minibatch_size, data_parallel_rank, data_parallel_size)
        super().__init__(total_samples, consumed_samples, *sizes)
        if consumed_samples >= total_samples:
            raise ArgumentError(
                f"MegatronPretrainingSampler: no samples left to consume: {consumed_samples} of "
                f"{total_samples} were consumed."
            )
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches, from ``consumed_samples`` on."""
        first = self.consumed_samples
        while first < self.total_samples:
            end = first + self.local_minibatch_times_data_parallel_size
            if end > self.total_samples and self.drop_last:
                return
            mine = first + self.data_parallel_rank * self.local_minibatch_size
            yield list(range(mine, min(mine + self.local_minibatch_size, self.total_samples)))
            first = end


class MegatronPretrainingRandomSampler(_Sampler):
    """Yield batches in a random order that differs in each epoch. Ranks share no samples.

    Each rank has its own block of the dataset, and shuffles it with the epoch's number as the seed.
    Samples that do not fill a last global batch are left out. Every batch adds to
    ``consumed_samples``, so a second loop over the sampler is the next epoch.

    Arguments and errors are those of `MegatronPretrainingSampler`, without ``drop_last``.
    ``consumed_samples`` counts the samples of all epochs. A loop raises an error if a global batch
    needs more samples than there are.

    Example:
        >>> sampler = MegatronPretrainingRandomSampler(8, 0, 2, 1, 2)
        >>> sorted(index for batch in sampler for index in batch)
        [4, 5, 6, 7]
    """

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches of one epoch, from ``consumed_samples`` on."""
        together = self.local_minibatch_times_data_parallel_size
        batches = self.total_samples // together
        if not batches:
            raise ArgumentError(
                f"MegatronPretrainingRandomSampler: total_samples is {self.total_samples}, fewer "
                f"than a global batch of local_minibatch_size x data_parallel_size = {together}."
            )
        self.epoch, consumed = divmod(self.consumed_samples, batches * together)
        generator = torch.Generator("cpu").manual_seed(self.epoch)
        block = batches * self.local_minibatch_size
        order = torch.randperm(block, generator=generator, device="cpu").tolist()
        first = consumed // self.data_parallel_size
        while (end := first + self.local_minibatch_size) <= block:
            self.consumed_samples += self.local_minibatch_times_data_parallel_size
            yield [self.data_parallel_rank * block + index for index in order[first:end]]
            first = end
