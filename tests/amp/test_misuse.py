"""Loops that are written oddly: right, or refused, never silently mis-scaled.

Every case is one weight row of zeros and a constant gradient, so the right numbers are whole.
"""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from apex import amp

LEVELS = ["O0", "O1", "O2", "O5"]


def start(level, optimizers=1, **kwargs):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    made = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(optimizers)]
    kwargs = {"loss_scale": 8.0, **kwargs}
    model, made = amp.initialize(model, made, opt_level=level, verbosity=0, **kwargs)
    return model, *made, torch.ones(1, 2)


def value(model):
    return model.state_dict()["weight"].flatten().tolist()


@pytest.mark.parametrize("level", LEVELS)
def test_a_sharer_that_was_not_listed(level):
    model, a, b, x = start(level, optimizers=2)
    with amp.scale_loss(model(x).sum(), a) as scaled:
        scaled.backward()
    a.step()
    b.step()
    assert value(model) == [-2.0, -2.0]


@pytest.mark.parametrize("level", LEVELS)
def test_sharers_and_model_zero_grad(level):
    model, a, b, x = start(level, optimizers=2)
    for _ in range(3):
        model.zero_grad()
        with amp.scale_loss(model(x).sum(), [a, b]) as scaled:
            scaled.backward()
        a.step()
        b.step()
    assert value(model) == [-6.0, -6.0]


@pytest.mark.parametrize("level", LEVELS[1:])
def test_nested_blocks_of_sharers_are_refused(level):
    model, a, b, x = start(level, optimizers=2)
    with amp.scale_loss(model(x).sum(), a) as scaled:
        with (
            pytest.raises(RuntimeError, match="shares a parameter"),
            amp.scale_loss(model(x).sum(), b),
        ):
            pass
        scaled.backward()
    a.step()
    assert value(model) == [-1.0, -1.0]


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_bare_backward_with_gradients_zeroed_in_place(level, order):
    model, optimizer, x = start(level, loss_scale=1.0)
    for _ in range(3):
        if order == "before":
            model.zero_grad(set_to_none=False)
        model(x).sum().backward()
        optimizer.step()
        if order == "after":
            model.zero_grad(set_to_none=False)
    assert value(model) == [-3.0, -3.0]


@pytest.mark.parametrize("scaled_first", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_a_scaled_and_a_bare_backward_in_one_step(level, scaled_first):
    model, optimizer, x = start(level)
    for scaled_now in (scaled_first, not scaled_first):
        if scaled_now:
            with amp.scale_loss(model(x).sum(), optimizer) as scaled:
                scaled.backward()
        else:
            (2 * model(x).sum()).backward()
    optimizer.step()
    assert value(model) == [-3.0, -3.0]


@pytest.mark.parametrize("level", LEVELS[:3])
def test_step_inside_the_block_is_refused(level):
    model, optimizer, x = start(level)
    with amp.scale_loss(model(x).sum(), optimizer) as scaled:
        scaled.backward()
        with pytest.raises(RuntimeError, match="inside the scale_loss block"):
            optimizer.step()
    optimizer.step()
    assert value(model) == [-1.0, -1.0]


@pytest.mark.parametrize("level", LEVELS)
def test_zero_grad_inside_the_block_clears_what_was_before(level):
    model, optimizer, x = start(level)
    for _ in range(3):
        with amp.scale_loss(model(x).sum(), optimizer) as scaled:
            optimizer.zero_grad()
            scaled.backward()
        optimizer.step()
    assert value(model) == [-3.0, -3.0]


def test_zero_grad_drops_an_overflow_with_its_gradients():
    model, optimizer, x = start("O1", loss_scale="dynamic", init_scale=4.0)
    for poison in (True, False):
        optimizer.zero_grad()
        with amp.scale_loss(model(x).sum(), optimizer) as scaled:
            scaled.backward()
            if poison:
                model.weight.grad.fill_(math.inf)
    assert len(optimizer._amp_stash.ledger.passes) == 1
    optimizer.step()
    assert value(model) == [-1.0, -1.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_zero_grad_of_one_optimizer_keeps_an_overflow_for_the_other(level):
    """The inf of a delayed pass goes with the gradients of the one, and the other has to skip."""
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    pair = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    models, pair = amp.initialize(models, pair, opt_level=level, init_scale=8.0, verbosity=0)
    before = value(models[1])
    loss = sum(model(torch.ones(1, 2)).float().sum() for model in models)
    with amp.scale_loss(loss, pair, delay_unscale=True) as scaled:
        scaled.backward()
        models[0].weight.grad.fill_(math.inf)
    pair[0].zero_grad()
    pair[1].step()
    assert not amp.stepped(pair[1])
    assert value(models[1]) == before
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 4.0


def test_an_unbounded_scale_stays_finite():
    model, optimizer, x = start(
        "O0", loss_scale="dynamic", max_loss_scale=None, growth_interval=1, init_scale=2.0**120
    )
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(20):
        optimizer.zero_grad()
        with amp.scale_loss(1e-30 * model(x).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**127


@pytest.mark.parametrize(
    "kwargs",
    [
        {"loss_scale": 0},
        {"loss_scale": "0"},
        {"loss_scale": math.nan},
        {"loss_scale": math.inf},
        {"loss_scale": -1.0},
        {"max_loss_scale": 0.0},
        {"min_loss_scale": -5.0},
        {"growth_interval": 1.5},
        {"init_scale": 1e300},
    ],
    ids=str,
)
def test_scales_out_of_range_are_refused_at_once(kwargs):
    with pytest.raises(ValueError, match="loss scaling: .* must be"):
        start("O2", **kwargs)


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_sparse_gradients_reach_the_masters(level, bare):
    model = nn.Embedding(5, 3, sparse=True)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(2):
        loss = model(torch.tensor([1, 1, 2])).sum()
        if bare:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.state_dict()["weight"].sum(1).tolist() == [0.0, -12.0, -6.0, 0.0, 0.0]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_models_materialised_after_initialize(level):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(1.0)
    optimizer.zero_grad()
    optimizer.step()
    assert model.state_dict()["0.weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_evidence_of_an_overflow_can_be_read():
    model, optimizer, x = start("O1", loss_scale="dynamic")
    scaler = amp._amp_state.loss_scalers[0]
    with amp.scale_loss(model(x).sum(), optimizer) as scaled:
        scaled.backward()
        model.weight.grad.fill_(math.nan)
    assert scaler._has_overflow
    assert scaler._overflow_buf.tolist() == [1]
    scaler.dynamic = False
    scale = scaler.loss_scale()
    optimizer.step()
    with amp.scale_loss(model(x).sum(), optimizer) as scaled:
        scaled.backward()
    assert scaler.loss_scale() == scale
    scaler.dynamic = True
    scaler._overflow_buf = torch.ones(1, dtype=torch.int32)
    assert scaler.update_scale()
    assert scaler.loss_scale() == scale / 2


def test_a_wrapper_that_is_no_optimizer():
    class Wrapper:
        def __init__(self, optim):
            self.optim = optim

        def __getattr__(self, name):
            if name == "optim":
                raise AttributeError(name)
            return getattr(self.optim, name)

        def step(self, closure=None):
            return self.optim.step(closure)

        def zero_grad(self, set_to_none=True):
            self.optim.zero_grad(set_to_none)

    for level in ("O0", "O1", "O2", "O3"):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        model, optimizer = amp.initialize(model, Wrapper(inner), opt_level=level, verbosity=0)
        for factor in (math.inf if level in ("O1", "O2") else 0.0, 2**-10):
            optimizer.zero_grad()
            with amp.scale_loss(factor * model(torch.ones(1, 2)).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            scheduler.step()  # a warning here would fail the test
        assert value(model) == [-(2**-11)] * 2
        amp.reset()


def test_scaled_gradients_of_the_model_are_gone_when_the_next_forward_begins():
    model, optimizer, x = start("O2")
    with amp.scale_loss(model(x).sum(), optimizer) as scaled:
        scaled.backward()
    assert model.weight.grad.flatten().tolist() == [8.0, 8.0]  # scaled, to be read, as ever
    left = weakref.ref(model.weight.grad)
    optimizer.step()
    model.zero_grad()
    model(x)
    gc.collect()
    assert left() is None
