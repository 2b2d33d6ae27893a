"""Clipping gradients between a block and a step, ``amp.stepped``, and torch's own scaler."""

import functools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F

from apex import amp
from tests.amp.training import (
    Plain,
    backward,
    batches,
    block,
    copies,
    grads_of,
    net,
    row,
    same,
    sgd,
    spoil,
    started,
    train,
    value,
)
from tests.tolerance import assert_one_rounding


def of_masters(optimizer, *args):
    return torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), *args)


def of_groups(optimizer, *args):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.nn.utils.clip_grad_norm_(params, *args)


def by_value(optimizer, limit):
    torch.nn.utils.clip_grad_value_(amp.master_params(optimizer), limit)


class Conjugated(torch.nn.Module):
    """Its gradient, 1, has the negative bit: the sign is not in memory."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5]))

    def forward(self, x):
        number = torch.complex(torch.zeros(1), self.weight.float())
        return x * (number.conj() * 1j).real


@pytest.mark.parametrize("clip", [amp.clip_grad_norm_, amp.clip_grad_value_])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_gradients_with_the_negative_bit(level, clip):
    """Accumulated over three passes, and clipped to 1."""
    model = Conjugated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scale = 128.0 if level in ("O1", "O2") else None
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=scale, verbosity=0
    )
    for _ in range(3):
        with amp.scale_loss(model(torch.ones(1)).sum(), optimizer) as scaled:
            scaled.backward()
    (weight,) = amp.master_params(optimizer)
    assert weight.grad.item() == 3.0
    clip(optimizer, 1.0)
    assert_one_rounding(weight.grad.resolve_neg(), torch.ones(1, dtype=torch.float64))
    optimizer.step()
    assert_one_rounding(weight.detach(), torch.tensor([0.375], dtype=torch.float64))


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize(
    ("level", "clip", "norm_type"),
    [
        ("O0", amp.clip_grad_norm_, 2.0),
        ("O1", amp.clip_grad_norm_, 1.0),
        ("O2", amp.clip_grad_norm_, math.inf),
        ("O5", amp.clip_grad_norm_, 2.0),
        ("O1", of_masters, 2.0),
        ("O2", of_masters, 2.0),
        ("O2", of_groups, 2.0),
    ],
)
def test_clipping_by_norm_equals_the_one_in_plain_torch(level, clip, norm_type, overflow):
    model, optimizer = started(level)
    plain = Plain(net(), sgd, level)
    overflow = overflow and level in ("O1", "O2")
    norms = []
    for number, batch in enumerate(batches(3)):
        spoiled = spoil if overflow and number == 1 else None
        optimizer.zero_grad()
        backward(model, optimizer, batch, spoiled)
        norms.append(clip(optimizer, 0.1, norm_type))
        optimizer.step()

        def by_torch(params):
            norms.append(torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type))

        plain.step(batch, spoil=spoiled, treat=by_torch)
        assert same(norms[-1:], norms[-2:-1]) or not norms[-1].isfinite()
        assert torch.isfinite(norms[-1]) == torch.isfinite(norms[-2]) == (spoiled is None)
    assert same(amp.master_params(optimizer), plain.params)


@pytest.mark.parametrize("clip", [amp.clip_grad_value_, by_value])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_clipping_by_value(level, clip):
    model, optimizer = row(level)
    block(model, optimizer, 3.0, delay_unscale=clip is amp.clip_grad_value_)
    clip(optimizer, 0.5)
    assert same(grads_of(optimizer), [torch.full((1, 2), 0.5)])


def test_a_norm_that_is_not_finite():
    model, optimizer = row("O1", loss_scale="dynamic")
    block(model, optimizer, math.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        amp.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert not torch.isfinite(amp.clip_grad_norm_(optimizer, 1.0))
    optimizer.step()
    assert not amp.stepped(optimizer)


def test_optimizers_that_amp_does_not_know():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 3.0)
    optimizer = sgd([parameter])
    amp.clip_grad_value_(optimizer, 1.0)
    assert torch.equal(parameter.grad, torch.ones(2))
    assert amp.stepped(optimizer)


def test_a_clip_of_the_models_own_gradients_at_o2_is_noticed_once():
    model, optimizer = row("O2")
    for number in range(2):
        optimizer.zero_grad()
        block(model, optimizer, 3.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if number == 0:
            with pytest.warns(UserWarning, match="no effect.*clip_grad_norm_"):
                optimizer.step()
        else:
            optimizer.step()


def test_clipping_inside_the_block_meets_scaled_gradients():
    """Wrong, but common: the scaled norm is clipped, so the step is that much smaller."""
    model, optimizer = row("O1", loss_scale=128.0)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
        with pytest.warns(UserWarning, match="inside the scale_loss block.*after the block"):
            by_value(optimizer, 64.0)
    assert same(grads_of(optimizer), [torch.full((1, 2), 0.5)])


@pytest.mark.parametrize(("level", "count"), [("O0", 0), ("O1", 1), ("O2", 1), ("O4", 0)])
def test_reading_scaled_gradients_warns_once(level, count):
    model, optimizer = started(level, optimizer=sgd)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches(2):
            loss = F.cross_entropy(model(batch[0]).float(), batch[1])
            with amp.scale_loss(loss, optimizer) as scaled:
                list(amp.master_params(optimizer))  # there is nothing to read yet
                scaled.backward()
                list(amp.master_params(optimizer))
            list(amp.master_params(optimizer))
            optimizer.step()
            optimizer.zero_grad()
    assert len(caught) == count


@pytest.mark.parametrize("clip", [amp.clip_grad_norm_, amp.clip_grad_value_])
def test_clipping_takes_the_optimizer(clip):
    parameters = torch.nn.Linear(2, 2).parameters()
    with pytest.raises(TypeError, match="got generator. Pass the optimizer"):
        clip(parameters, 1.0)


@pytest.mark.parametrize("level", [None, "O0", "O1"])
def test_torchs_scaler_with_amps_autocast(level):
    """Which is that of O1 before any initialize."""
    model = net()
    plain, optimizer = Plain(model, sgd, level or "O1", scale=2.0**10), sgd(model.parameters())
    if level:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scaler = amp.GradScaler("cpu", init_scale=2.0**10)
    for number, (x, y) in enumerate(batches(3)):
        bad = spoil if number == 1 and level != "O0" else None
        optimizer.zero_grad()
        with amp.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        if bad:
            bad(model)
        scaler.step(optimizer)
        scaler.update()
        plain.step((x, y), spoil=bad)
        assert same(model.parameters(), plain.params)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [None, True])
def test_torchs_scaler_is_refused_where_there_are_masters(fused, unscale):
    model, optimizer = started("O2", optimizer=functools.partial(sgd, fused=fused))
    scaler = amp.GradScaler("cpu")
    ((x, y),) = batches(1)
    before = copies(amp.master_params(optimizer))
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="amp.scale_loss"):
        scaler.step(optimizer)
    assert same(before, amp.master_params(optimizer))
    train(model, optimizer, [(x, y)])
    assert amp.stepped(optimizer)
    amp.reset()
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is bool(fused)


def test_torchs_scaler_switched_off_is_a_plain_backward():
    model, optimizer = row("O5", loss_scale=1.0)
    scaler = amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert value(model) == [-2.0, -2.0]
