"""Gradients that programs clear, share between optimizers, or compute outside of blocks."""

import functools
import gc
import math
import weakref

import pytest
import torch

from apex import amp
from apex.amp.gradients import ledger as ledgers
from tests.amp.training import (
    MASTERED,
    batches,
    block,
    copies,
    grads_of,
    row,
    same,
    scaled_backward,
    sgd,
    started,
    step,
    value,
)
from tests.amp.training import backward as one_pass

LEVELS = ["O0", "O1", "O2", "O5"]
DYNAMIC = {"loss_scale": "dynamic", "init_scale": 8.0}


@pytest.mark.parametrize("set_to_none", [True, False, None])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_zero_grad(level, set_to_none):
    model, optimizer = started(level)
    (batch,) = batches(1)
    one_pass(model, optimizer, batch)
    first = copies(grads_of(optimizer))
    optimizer.zero_grad(**({} if set_to_none is None else {"set_to_none": set_to_none}))
    for p in [*model.parameters(), *amp.master_params(optimizer)]:
        if set_to_none is False:
            assert p.grad is None or not p.grad.any()
        else:
            assert p.grad is None
    one_pass(model, optimizer, batch)  # in which nothing of the first pass is left
    assert same(first, grads_of(optimizer))


@pytest.mark.parametrize("how", ["zero_grad", "zeros", "none"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_that_the_program_drops(level, how):
    model, optimizer = row(level)
    block(model, optimizer, 10.0)
    if how == "none":
        model.weight.grad = None
    else:
        model.zero_grad(set_to_none=how == "zero_grad")
    step(model, optimizer)
    assert value(model) == [-1.0, -1.0]


@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_overflow_goes_with_the_batch_that_the_program_drops(level, by_model):
    model, optimizer = row(level, **DYNAMIC)
    block(model, optimizer, math.inf)
    (model if by_model else optimizer).zero_grad()
    block(model, optimizer)
    assert len(optimizer._amp_stash.ledger.passes) == 1
    optimizer.step()
    assert value(model) == [-1.0, -1.0]


def test_scaled_gradients_of_the_model_are_gone_when_the_next_forward_begins():
    model, optimizer = row("O2")
    block(model, optimizer)
    assert model.weight.grad.flatten().tolist() == [8.0, 8.0]  # still scaled
    left = weakref.ref(model.weight.grad)
    optimizer.step()
    model.zero_grad()
    model(torch.ones(1, 2))
    gc.collect()
    assert left() is None


# -- two optimizers of one weight ------------------------------------------------------------------


def test_an_idle_optimizer_does_not_collect_passes_without_end(monkeypatch):
    monkeypatch.setattr(ledgers, "_MOST_PASSES", 3)
    model, busy, idle = row("O1", count=2, **DYNAMIC)
    for _ in range(10):
        model.zero_grad()
        step(model, busy)
    assert len(idle._amp_stash.ledger.passes) == 4


# -- backward outside of blocks --------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("level", MASTERED)
def test_bare_backward_with_gradients_zeroed_in_place(level, order):
    model, optimizer = row(level, loss_scale=1.0)
    for _ in range(3):
        if order == "before":
            model.zero_grad(set_to_none=False)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if order == "after":
            model.zero_grad(set_to_none=False)
    assert value(model) == [-3.0, -3.0]


@pytest.mark.parametrize("both", [True, False])
def test_zeros_in_one_of_two_gradients_drop_nothing(both):
    """Whether the other one is edited, too, or not."""
    layers = [torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        torch.nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    block(model, optimizer)
    layers[0].weight.grad.zero_()
    if both:
        layers[1].weight.grad.mul_(1.0)
    step(model, optimizer)
    assert layers[0].weight.tolist() == [[-1.0, -1.0], [-1.0, -1.0]]
    assert layers[1].weight.tolist() == [[-3.0, -3.0]]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_goes_with_the_gradients_that_zero_grad_zeroes(level):
    model, optimizer = started(level, torch.nn.Linear(2, 2), functools.partial(sgd, lr=0.5))
    for number in (math.inf, 1.0):
        optimizer.zero_grad(set_to_none=False)
        scaled_backward(model(torch.full((1, 2), number)).float().mean(), optimizer)
    optimizer.step()
    assert amp.stepped(optimizer)
