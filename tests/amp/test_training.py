"""Trainings of a few steps: gradients, scales and what they leave alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.amp.levels import train_step
from tests.amp.training import backward, batches, copies, net, same, scaled_backward, started


def test_the_counter_of_a_static_scale_stands_still():
    model, optimizer = started("O2", nn.Linear(2, 2), loss_scale=2.0)
    for _ in range(3):
        train_step(model, optimizer, torch.ones(1, 2))
        amp._amp_state.loss_scalers[0].update_scale()  # as programs do that check by themselves
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}}


def test_a_weight_used_twice_gets_the_gradients_of_both_uses():
    class Tied(nn.Linear):
        def forward(self, x):
            return super().forward(super().forward(x))

    model, x = Tied(3, 3, bias=False), torch.randn(4, 3)
    by_hand = model.weight.detach().clone().requires_grad_()
    model, optimizer = started("O1", model, loss_scale=1.0)
    with amp.disable_casts():
        half = by_hand.half()
        F.linear(F.linear(x.half(), half), half).float().sum().backward()
    for _ in range(2):  # the second pass has no stale cast to meet
        optimizer.zero_grad()
        scaled_backward(model(x).float().sum(), optimizer)
        assert torch.equal(model.weight.grad, by_hand.grad)


def test_o0_is_plain_torch():
    ends = []
    for use_amp in (False, True):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        ((x, y),) = batches(1)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        moments = [slots["exp_avg"] for slots in optimizer.state.values()]
        if use_amp:
            amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
        now = [slots["exp_avg"] for slots in optimizer.state.values()]
        assert all(a is b for a, b in zip(moments, now, strict=True))
        assert not any(module._state_dict_hooks for module in model.modules())
        for x, y in batches(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if use_amp:
                with amp.scale_loss(loss, optimizer) as scaled:
                    assert scaled is loss
                    scaled.backward()
            else:
                loss.backward()
            optimizer.step()
        ends.append([*model.state_dict().values(), *[p.grad for p in model.parameters()]])
    assert same(*ends)


def test_bounds_hold_from_the_start_and_for_a_loaded_scale():
    model, _ = started("O2", nn.Linear(2, 2), min_loss_scale=2.0**18, max_loss_scale=2.0**20)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**18
    for saved, taken in ((4.0, 2.0**18), (2.0**24, 2.0**20), (2.0**19, 2.0**19)):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": saved, "unskipped": 0}})
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == taken


@pytest.mark.gpu
@pytest.mark.parametrize("poisoned", [0, 1, None])
def test_a_model_on_two_devices(poisoned):
    class Split(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x).cuda())

    split = Split(nn.Linear(2, 2), nn.Linear(2, 2, device="cuda"))
    model, optimizer = started("O2", split, init_scale=8.0)
    before = [p.clone() for p in model.parameters()]
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
        if poisoned is not None:
            model[poisoned].weight.grad.fill_(math.inf)
    optimizer.step()
    assert same(before, model.parameters()) == (poisoned is not None)
    expected = 8.0 if poisoned is None else 4.0
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == expected


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulation_with_gradients_that_are_views_of_ddps_buckets(level):
    ends = []
    for view in (False, True):
        model, optimizer = started(level, loss_scale=128.0)
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
        for _ in range(2):
            optimizer.zero_grad()
            for batch in batches(3):
                backward(model, optimizer, batch)
            optimizer.step()
        ends.append(copies(amp.master_params(optimizer)))
        amp.reset()
    assert same(*ends)
