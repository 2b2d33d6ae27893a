"""Scales and refusals; programs are in ``test_idioms.py``, sequences in ``test_ledger.py``."""

import math

import pytest
import torch
from torch import nn

from apex import amp
from tests.amp.training import (
    backward,
    batches,
    block,
    row,
    scale_now,
    scaled_backward,
    spoil,
    started,
    step,
    value,
)

DYNAMIC = {"loss_scale": "dynamic", "init_scale": 8.0}


def test_finite_gradients_whose_sum_overflows_are_no_overflow():
    model, optimizer = row("O1", lr=0.0, **DYNAMIC)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
        model.weight.grad.fill_(3e38)
    optimizer.step()
    assert scale_now() == 8.0


# -- scales ----------------------------------------------------------------------------------------


def test_delay_overflow_check_keeps_the_scale_and_still_skips():
    model, optimizer = row("O1", **DYNAMIC)
    block(model, optimizer, math.nan, delay_overflow_check=True)
    assert scale_now() == 8.0
    optimizer.step()
    assert value(model) == [0.0, 0.0]
    block(model, optimizer)
    assert scale_now() == 4.0  # the flag was kept for the next check


def test_dead_training_says_who_is_to_blame():
    model, optimizer = started("O1", max_skipped_steps=3)
    ((x, y),) = batches(1)
    for attempt in range(3):
        backward(model, optimizer, (x, y), spoil)
        if attempt < 2:
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"3 steps in a row.*'4.bias'.*loss itself was finite"):
        optimizer.step()
    backward(model, optimizer, (x * math.inf, y))
    with pytest.raises(RuntimeError, match=r"'0.weight'.*loss itself was not finite"):
        optimizer.step()


def test_scale_never_reaches_zero():
    model, optimizer = row("O1", loss_scale="dynamic", max_skipped_steps=10**9)
    for _ in range(200):
        step(model, optimizer, math.nan)
    assert scale_now() == torch.finfo(torch.float32).tiny


def test_an_unbounded_scale_stays_finite():
    options = {"max_loss_scale": None, "growth_interval": 1, "init_scale": 2.0**120}
    model, optimizer = row("O0", lr=0.0, loss_scale="dynamic", **options)
    for _ in range(20):
        optimizer.zero_grad()
        step(model, optimizer, 1e-30)
    assert scale_now() == 2.0**127


def test_flags_of_an_overflow_can_be_read():
    model, optimizer = row("O1", loss_scale="dynamic")
    scaler = amp._amp_state.loss_scalers[0]
    block(model, optimizer, math.nan)
    assert scaler._has_overflow
    assert scaler._overflow_buf.tolist() == [1]
    scaler.dynamic = False
    scale = scaler.loss_scale()
    optimizer.step()
    block(model, optimizer, math.nan)
    assert scaler.loss_scale() == scale
    scaler.dynamic = True
    scaler._overflow_buf = torch.ones(1, dtype=torch.int32)
    assert scaler.update_scale()
    assert scaler.loss_scale() == scale / 2


# -- sparse gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "bare"), [("O1", False), ("O2", False), ("O2", True), ("O5", True)]
)
def test_sparse_gradients(level, bare):
    model = nn.Embedding(5, 3, sparse=True)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    passes = 1 if bare else 2  # torch cannot add sparse gradients of 16 bits on a CPU
    for _ in range(2):
        for _ in range(passes):
            loss = model(torch.tensor([1, 1, 2])).sum()
            loss.backward() if bare else scaled_backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    sums = [0.0, -12.0 * passes, -6.0 * passes, 0.0, 0.0]
    assert model.state_dict()["weight"].sum(1).tolist() == sums


# -- what is refused -------------------------------------------------------------------------------


def test_losses_that_cannot_be_scaled_are_refused():
    _, optimizer = row("O1")
    for loss in (1.0, torch.tensor(3), None):
        with pytest.raises(TypeError, match="must be a floating tensor"):
            scaled_backward(loss, optimizer)
    with pytest.raises(IndexError, match=r"loss_id was 1.*num_losses=1"):
        scaled_backward(torch.ones(()), optimizer, loss_id=1)


def test_a_backward_of_another_loss_warns():
    model, optimizer = row("O1", **DYNAMIC)
    loss = model(torch.ones(1, 2)).sum()
    with (
        pytest.warns(UserWarning, match=r"not from the scaled loss.*scaled_loss.backward"),
        amp.scale_loss(loss, optimizer),
    ):
        loss.backward()
    out = model(torch.ones(3, 2))
    with amp.scale_loss(out, optimizer):  # a stage of a pipeline, whose gradient is scaled
        out.backward(torch.full_like(out, 8.0))
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        torch.autograd.backward([scaled * 2])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_that_is_left_out_of_the_block_does_not_step(level):
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    amp.initialize([first, second], optimizers, opt_level=level, verbosity=0)
    before, x = second.weight.detach().clone(), torch.ones(1, 2)
    for use in (optimizers[1].step, lambda: amp.clip_grad_norm_(optimizers[1], 1.0)):
        scaled_backward(second(first(x)).float().sum(), optimizers[0])
        optimizers[0].step()
        with pytest.raises(RuntimeError, match=r"without this optimizer.*\[first, second\]"):
            use()
        assert torch.equal(second.weight, before)
        optimizers[1].zero_grad()
    scaled_backward(second(first(x)).float().sum(), optimizers[0])  # as of a GAN
    for model in (first, second):
        model.zero_grad()
    second(first(x)).float().sum().backward()
    optimizers[1].step()
    assert not torch.equal(second.weight, before)


def test_scale_loss_needs_initialize():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    with pytest.raises(RuntimeError, match=r"before amp.initialize"):
        scaled_backward(torch.ones(()), optimizer)
    _ = row("O1")
    with pytest.raises(RuntimeError, match=r"SGD, which did not go through"):
        scaled_backward(torch.ones(()), optimizer)


def test_one_block_for_optimizers_of_several_trainings():
    model, first = row("O1")
    other = nn.Linear(2, 1)
    second = torch.optim.SGD(other.parameters(), lr=1.0)
    amp.initialize(other, second, opt_level="O4", verbosity=0)
    loss = model(torch.ones(1, 2)).sum() + other(torch.ones(1, 2)).sum()
    for listed in ([first, second], [second, first]):
        with pytest.raises(RuntimeError, match="several amp.initialize calls"):
            scaled_backward(loss, listed)


def test_disabled_yields_the_very_same_loss():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    loss = model(torch.ones(1, 2)).sum()
    for _ in range(2):
        with amp.scale_loss(loss, optimizer) as scaled:
            assert scaled is loss
        other = nn.Linear(1, 1)  # also after another training has begun
        amp.initialize(other, torch.optim.SGD(other.parameters(), lr=1.0), verbosity=0)


def test_skipped_steps_are_counted_in_a_row():
    model, optimizer = row("O1", loss_scale="dynamic", max_skipped_steps=3)
    for x in (math.inf, math.inf, 1.0, math.inf, math.inf):
        optimizer.zero_grad()
        step(model, optimizer, x)
    block(model, optimizer, math.inf)
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        optimizer.step()


@pytest.mark.parametrize("loss_scale", [8.0, 1.0])
def test_a_float64_loss_stays_float64(loss_scale):
    model, optimizer = row("O0", loss_scale=loss_scale)
    loss = model(torch.ones(1, 2)).double().sum() + 1 / 3
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype == torch.float64
        assert scaled.item() == loss_scale / 3
