"""Clipping by optimizer, and what is told about steps."""

import math

import pytest
import torch
import torch.nn.functional as F

from apex import amp
from tests.amp.hand import Hand, batches, net, same

LEVELS = ["O0", "O1", "O2", "O4", "O5"]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def start(level):
    model = net()
    hand = Hand(model, sgd, level)
    model, optimizer = amp.initialize(model, sgd(model.parameters()), opt_level=level, verbosity=0)
    return model, optimizer, hand


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_clipping_by_norm_equals_clipping_by_hand(level, norm_type):
    model, optimizer, hand = start(level)
    for x, y in batches(3):
        optimizer.zero_grad()
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
        norm = amp.clip_grad_norm_(optimizer, 0.1, norm_type)
        optimizer.step()
        hand.zero_grad()
        hand.backward(hand.loss(x, y))
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(hand.params, 0.1, norm_type))
        hand.step()
    assert same(amp.master_params(optimizer), hand.params)


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_by_value_after_delayed_passes(level):
    model, optimizer, _ = start(level)
    ((x, y),) = batches(1)
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    amp.clip_grad_value_(optimizer, 1e-3)
    grads = [p.grad for p in amp.master_params(optimizer)]
    assert max(g.abs().max() for g in grads) == torch.tensor(1e-3)


def test_a_norm_that_is_not_finite():
    model, optimizer, _ = start("O1")
    ((x, y),) = batches(1)
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
        model[0].weight.grad.fill_(math.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        amp.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert not torch.isfinite(amp.clip_grad_norm_(optimizer, 1.0))
    optimizer.step()
    assert not amp.stepped(optimizer)


def test_clipping_inside_the_block_is_refused():
    model, optimizer, _ = start("O1")
    ((x, y),) = batches(1)
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
        with pytest.raises(RuntimeError, match="Clip after it"):
            amp.clip_grad_norm_(optimizer, 1.0)


def test_optimizers_that_amp_does_not_know():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 3.0)
    optimizer = sgd([parameter])
    amp.clip_grad_value_(optimizer, 1.0)
    assert torch.equal(parameter.grad, torch.ones(2))
    assert amp.stepped(optimizer)


def test_a_clip_of_the_models_own_gradients_at_o2_is_noticed_once():
    model, optimizer, _ = start("O2")
    for number, (x, y) in enumerate(batches(2)):
        optimizer.zero_grad()
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if number == 0:
            with pytest.warns(UserWarning, match="no effect.*clip_grad_norm_"):
                optimizer.step()
        else:
            optimizer.step()


@pytest.mark.parametrize("clip", [amp.clip_grad_norm_, amp.clip_grad_value_])
def test_clipping_takes_the_optimizer(clip):
    parameters = torch.nn.Linear(2, 2).parameters()
    with pytest.raises(TypeError, match="they were given generator. Pass the optimizer"):
        clip(parameters, 1.0)


def test_stepped_follows_each_step():
    model, optimizer, _ = start("O2")
    assert not amp.stepped(optimizer)
    seen = []
    for number, (x, y) in enumerate(batches(3)):
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
            if number == 1:
                model[0].weight.grad[0] = math.nan
        optimizer.step()
        optimizer.zero_grad()
        seen.append(amp.stepped(optimizer))
    assert seen == [True, False, True]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [None, True])
def test_torchs_scaler_is_refused_where_there_are_masters(fused, unscale):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    scaler = amp.GradScaler("cpu")
    ((x, y),) = batches(1)
    before = [p.clone() for p in amp.master_params(optimizer)]
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="amp.scale_loss"):
        scaler.step(optimizer)
    assert same(before, amp.master_params(optimizer))
    optimizer.zero_grad()
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert amp.stepped(optimizer)
    amp.reset()
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is bool(fused)


def test_torchs_scaler_switched_off_is_a_plain_backward():
    runs = []
    for use_scaler in (True, False):
        model, optimizer, _ = start("O5")
        scaler = amp.GradScaler("cpu", enabled=False)
        for x, y in batches(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if use_scaler:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
        runs.append([p.detach() for p in amp.master_params(optimizer)])
        amp.reset()
    assert same(*runs)
