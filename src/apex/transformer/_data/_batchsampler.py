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
    """Samples in their order: each rank gets its part of each global batch.

    Args:
        total_samples: Of the dataset.
        consumed_samples: How many of them, from the first on, were used; set at each resume.
        local_minibatch_size: Samples of one rank's batch.
        data_parallel_rank: Of this process.
        data_parallel_size: Ranks with different samples.
        drop_last: Whether a last, smaller global batch is dropped. If not, its first samples go to
            the first rank; the last ranks may get fewer, or an empty list.

    Raises:
        ArgumentError: There is nothing left to sample, or a number is out of range; it is a
            RuntimeError, TypeError and ValueError.

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
    """Samples in a random order, in which no two ranks share any; one order for each epoch.

    Each rank has a block of the dataset for itself, and shuffles it with the epoch's number as the
    seed. The samples that do not fill a last global batch are left out. ``consumed_samples`` counts
    on with every batch, so that a second loop over the sampler is the next epoch.

    Arguments and errors are those of `MegatronPretrainingSampler`, without ``drop_last``;
    ``consumed_samples`` counts those of all epochs, and a loop raises if there are fewer samples
    than a global batch has.

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
