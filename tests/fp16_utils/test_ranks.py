"""``FP16_Optimizer`` on two ranks: gradients are summed on the model, before masters get them."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import parallel
from apex.fp16_utils import FP16_Optimizer
from tests import checkpoints, tolerance

pytestmark = pytest.mark.dist

WRAPPERS = {
    "apex": lambda model: parallel.DistributedDataParallel(model),
    "apex, delayed": lambda model: parallel.DistributedDataParallel(model, delay_allreduce=True),
    "torch": lambda model: nn.parallel.DistributedDataParallel(model),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        self.first.half()
        self.last.half()

    def forward(self, x):
        return self.last(self.norm(self.first(x.half()).float()).half()).float()


def _loss(model, rank, step, number):
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + number)
    return F.mse_loss(model(torch.randn(4, 4, generator=generator)), torch.ones(4, 2))


def train(rank, name):
    """Four steps of two losses each; in the second rank 1 overflows."""
    model = Net()
    wrapper = WRAPPERS[name](model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    options = {"init_scale": 256.0, "scale_window": 2}
    optimizer = FP16_Optimizer(sgd, False, True, options, verbose=False)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        for number in range(2):
            loss = _loss(wrapper, rank, step, number)
            optimizer.backward(loss * (math.inf if (rank, step, number) == (1, 1, 0) else 1.0))
        grads = [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
        optimizer.step()
        seen.append([grads, optimizer.overflow, optimizer.loss_scale])
    return [seen, [p.detach() for p in model.parameters()], _mean_gradients(rank)]


def _mean_gradients(rank):
    """Of the first step of both ranks: scaled by 256 in float16, then added up in float32."""
    model = Net()
    total = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    for of in range(2):
        for number in range(2):
            loss = 256.0 * _loss(model, of, 0, number)
            for sums, grad in zip(
                total, torch.autograd.grad(loss, [*model.parameters()]), strict=True
            ):
                sums += grad.float() / 512.0
    return total


@pytest.mark.parametrize("name", WRAPPERS)
def test_ranks_train_one_model(two, name):
    first, second = two.run(functools.partial(train, name=name))
    checkpoints.assert_equal(first[1], second[1])
    assert [one[2] for one in first[0]] == [256.0, 128.0, 128.0, 256.0]
    assert [one[1:] for one in first[0]] == [one[1:] for one in second[0]]
    assert [one[1] for one in first[0]] == [False, True, False, False]
    checkpoints.assert_equal(first[0][0][0], second[0][0][0])
    tolerance.each(
        tolerance.assert_close_to_largest, first[0][0][0], first[2], tolerance.HALF_ACCUMULATION
    )


class OneUses(nn.Module):
    """The layer norm is float32 and only used where ``uses`` is set."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 4).half(), nn.LayerNorm(4)

    def forward(self, uses):
        x = self.first(torch.ones(2, 4).half()).float()
        return self.norm(x).square().sum() if uses else x.sum()


def unused(rank, name):
    """Two passes of one step; rank 1 does not use the layer norm."""
    model = OneUses()
    wrapper = FINDS_UNUSED[name](model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer = FP16_Optimizer(sgd, static_loss_scale=256.0, verbose=False)
    for _ in range(2):
        optimizer.backward(wrapper(rank == 0))
    return [p.grad for p in model.norm.parameters()]


FINDS_UNUSED = {
    **WRAPPERS,
    "torch": lambda model: nn.parallel.DistributedDataParallel(model, find_unused_parameters=True),
}


@pytest.mark.parametrize("name", FINDS_UNUSED)
def test_a_float32_parameter_that_one_rank_does_not_use(two, name):
    first, second = two.run(functools.partial(unused, name=name))
    checkpoints.assert_equal(first, second)
    model = OneUses()
    weights = [*model.norm.parameters()]
    tolerance.each(
        tolerance.assert_close_to_largest,
        first,
        torch.autograd.grad(model(True), weights),
        tolerance.HALF_ACCUMULATION,
    )
