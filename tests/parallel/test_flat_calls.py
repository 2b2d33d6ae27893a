"""``Reducer`` and the helpers of ``apex.parallel.distributed``."""

import apex_C
import pytest
import torch
import torch.distributed as dist

from apex.ops.lists import flat
from apex.parallel import ReduceOp, Reducer, distributed
from tests.ranks import RankError

pytestmark = pytest.mark.dist

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _tensors(rank):
    shapes = ((2, 3), (), (0, 4), (5, 1), (3,), (2, 2, 1))
    return [torch.full(s, rank + n + 1.0).to(KINDS[n % 4]) for n, s in enumerate(shapes)]


def collectives(rank):
    """Each dtype is reduced; ``all_reduce`` alone is divided by the number of ranks."""
    tensors = _tensors(rank)
    tensors[0] = tensors[0].t()  # not contiguous
    distributed.flat_dist_call(tensors, dist.all_reduce)
    for number, tensor in enumerate(tensors):
        assert tensor.eq(number + 1.5).all()
    tensors = _tensors(rank)
    distributed.flat_dist_call(tensors, dist.broadcast, (1,))
    for number, tensor in enumerate(tensors):
        assert tensor.eq(number + 2.0).all()
    alike = [torch.full((2,), rank + 1.0), torch.full((3, 1), rank + 2.0)]
    distributed.apply_flat_dist_call(alike, dist.all_reduce, (ReduceOp.MAX,))
    assert [tensor.view(-1).tolist() for tensor in alike] == [[1.0] * 2, [1.5] * 3]  # as in Apex
    weight = torch.ones(2, requires_grad=True)
    before = (weight * 2).square().sum()
    flat.broadcast([weight])
    before.backward()  # the graph is still valid
    return tensors


def reduced_when_asked(rank):
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    reducer = Reducer(model)
    model[0](torch.full((1, 2), rank + 1.0)).sum().backward()
    model[0].bias.grad = None
    reducer.reduce()
    assert model[0].weight.grad.eq(1.5).all()
    assert model[1].weight.grad is model[0].bias.grad is None
    grads = [torch.full((2,), rank + 1.0), {"more": torch.full((1,), rank + 3.0)}["more"]]
    Reducer([grads[0], (grads[1],)]).reduce()
    assert [grad.tolist() for grad in grads] == [[1.5, 1.5], [3.5]]
    return [parameter.detach() for parameter in model.parameters()]


def nothing_to_reduce(rank):
    Reducer(3)


@pytest.mark.parametrize("program", [collectives, reduced_when_asked])
@pytest.mark.slow
def test_ranks_are_equal(two, program):
    first, second = two.run(program)
    assert all(map(torch.equal, first, second))


def test_a_reducer_of_nothing(two):
    with pytest.raises(
        RankError, match="Reducer got 3, which is neither a module nor contains a tensor"
    ):
        two.run(nothing_to_reduce)


def test_splitting():
    tensors = _tensors(0)
    groups = distributed.split_half_float_double(tensors)
    dtypes = [{tensor.dtype for tensor in group} for group in groups]
    assert dtypes == [{torch.float16}, {torch.float32}, {torch.float64}, {torch.bfloat16}]
    by_type = distributed.split_by_type(tensors)
    assert list(by_type)[:2] == ["torch.FloatTensor", "torch.BFloat16Tensor"]
    assert sum(map(len, groups)) == sum(map(len, by_type.values())) == len(tensors)
    assert distributed.split_half_float_double([]) == []


def test_extracting():
    one, two = torch.ones(1), torch.ones(2)
    found = []
    distributed.extract_tensors([one, ("a", [two], 3, None)], found)
    assert found == [one, two]


def test_flat_copies():
    tensors = [torch.randn(2, 3), torch.randn(4)]
    joined = distributed.flatten(bucket=tensors)
    assert torch.equal(joined, apex_C.flatten(iter(tensors)))
    assert all(map(torch.equal, distributed.unflatten(coalesced=joined, bucket=tensors), tensors))
