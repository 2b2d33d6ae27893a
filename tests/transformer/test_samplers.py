"""Batch samplers of ``apex.transformer._data``."""

import itertools

import pytest
import torch

from apex.transformer._data import MegatronPretrainingRandomSampler, MegatronPretrainingSampler
from apex.transformer._data._batchsampler import MegatronPretrainingSampler as InItsModule


def test_each_rank_gets_its_part_of_each_global_batch():
    """In NVIDIA's, batches of all ranks but the first are empty."""
    ranks = [list(MegatronPretrainingSampler(26, 2, 3, rank, 3)) for rank in range(3)]
    assert ranks == [
        [[2, 3, 4], [11, 12, 13]], [[5, 6, 7], [14, 15, 16]], [[8, 9, 10], [17, 18, 19]],
    ]  # fmt: skip
    last = [
        list(MegatronPretrainingSampler(24, 2, 3, rank, 3, drop_last=False)) for rank in (0, 1, 2)
    ]
    assert [rank[-1] for rank in last] == [[20, 21, 22], [23], []]
    assert [rank[:-1] for rank in last] == ranks


def test_random_order():
    """Each epoch all but the last samples once, over all ranks, in an order of its own."""
    samplers = [MegatronPretrainingRandomSampler(26, 0, 3, rank, 2) for rank in range(2)]
    epochs = [[list(sampler) for sampler in samplers] for _ in range(2)]
    for epoch in epochs:
        flat = [index for rank in epoch for batch in rank for index in batch]
        assert sorted(flat) == list(range(24))
        assert all(len(batch) == 3 for rank in epoch for batch in rank)
        assert {len(rank) for rank in epoch} == {4}
    assert epochs[0] != epochs[1]
    assert epochs[0] == [list(MegatronPretrainingRandomSampler(26, 0, 3, r, 2)) for r in (0, 1)]
    assert [sampler.consumed_samples for sampler in samplers] == [48, 48]
    generator = torch.Generator().manual_seed(0)  # Megatron's order: the epoch is the seed
    order = torch.randperm(12, generator=generator).tolist()
    assert list(itertools.chain(*epochs[0][0])) == order
    assert list(itertools.chain(*epochs[0][1])) == [12 + index for index in order]


@pytest.mark.parametrize("sampler", [MegatronPretrainingSampler, MegatronPretrainingRandomSampler])
def test_resumed(sampler):
    whole = list(sampler(26, 0, 3, 1, 2))
    assert list(sampler(26, 12, 3, 1, 2)) == whole[2:]


def test_second_epoch_resumed():
    sampler = MegatronPretrainingRandomSampler(26, 24, 3, 1, 2)
    whole = list(sampler)
    assert sampler.epoch == 1
    assert list(MegatronPretrainingRandomSampler(26, 24 + 18, 3, 1, 2)) == whole[3:]


def test_batches_that_grow():
    sampler = MegatronPretrainingSampler(20, 0, 1, 1, 2)
    batches = iter(sampler)
    assert next(batches) == [1]
    sampler.local_minibatch_size = 3
    assert list(batches) == [[5, 6, 7], [11, 12, 13], [17, 18, 19]]
    shuffled = MegatronPretrainingRandomSampler(20, 0, 1, 1, 2)
    whole = list(MegatronPretrainingRandomSampler(20, 0, 1, 1, 2))
    batches = iter(shuffled)
    first = next(batches)
    shuffled.local_minibatch_size = 3
    assert [first, *batches] == [whole[0], *(sum(whole[i : i + 3], []) for i in (1, 4, 7))]
    assert shuffled.consumed_samples == 20


def test_with_a_loader():
    data = torch.arange(10.0)
    sampler = MegatronPretrainingSampler(10, 0, 2, 1, 2)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    assert [batch.tolist() for batch in loader] == [[2.0, 3.0], [6.0, 7.0]]
    assert len(sampler) == 10


@pytest.mark.parametrize("sampler", [MegatronPretrainingSampler, MegatronPretrainingRandomSampler])
def test_errors(sampler):
    for args, match in [
        ((0, 0, 1, 0, 1), "total_samples is 0, so there is no sample to consume"),
        ((10, -1, 1, 0, 1), "consumed_samples is -1; pass 0 or more"),
        ((10, 0, 0, 0, 1), "local_minibatch_size is 0; pass a positive number"),
        ((10, 0, 1, 2, 2), "data_parallel_rank is 2 of data_parallel_size 2"),
        ((10, 0, 1, 0, 0), "data_parallel_rank is 0 of data_parallel_size 0"),
    ]:
        with pytest.raises(RuntimeError, match=f"{sampler.__name__}: {match}"):
            sampler(*args)
    with pytest.raises(RuntimeError, match="no samples left to consume: 10 of 10 were consumed"):
        MegatronPretrainingSampler(10, 10, 1, 0, 1)
    with pytest.raises(
        RuntimeError, match="total_samples is 10, fewer than a global batch .* = 12"
    ):
        next(iter(MegatronPretrainingRandomSampler(10, 0, 6, 0, 2)))
    assert InItsModule is MegatronPretrainingSampler
