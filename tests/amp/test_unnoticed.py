"""A static scale that is too large, and a loop without scale_loss: one warning each."""

import warnings

import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedAdam

KINDS = [torch.optim.AdamW, FusedAdam]
OUTSIDE, STATIC = "entered no amp.scale_loss block", "and a static loss scale ("


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()


def made(level, kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = kind(model.parameters(), lr=1e-3)
    options = {"init_scale": 64.0, **options} if "loss_scale" not in options else options
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def loss_of(model):
    x = torch.linspace(-1, 1, 64, device="cpu").view(8, 8)
    return (model(x).float() - x.sum(1, keepdim=True)).square().mean()


def said(work):
    """The warnings of amp in what ``work`` does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(one.message) for one in caught]


def with_block(model, optimizer):
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def without(model, optimizer):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loop_that_never_enters_a_block_is_told_once(level, kind):
    both = made(level, kind)
    found = said(lambda: [without(*both) for _ in range(5)])
    assert len(found) == 1
    assert OUTSIDE in found[0]
    assert "Without the loss scale (64)" in found[0]


def clips(model, optimizer):
    optimizer.zero_grad()
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def test_clipping_in_between_hides_nothing():
    both = made("O1")
    assert len(said(lambda: [clips(*both) for _ in range(3)])) == 1


def first_step(model, optimizer):
    optimizer.step()
    with_block(model, optimizer)


def by_hand(model, optimizer):
    optimizer.zero_grad()
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 0.01)
    optimizer.step()


def taken(model, optimizer):
    optimizer.zero_grad()
    weights = [*model.parameters()]
    for weight, grad in zip(weights, torch.autograd.grad(loss_of(model), weights), strict=True):
        weight.grad = grad
    optimizer.step()


def replaced(model, optimizer):
    optimizer.zero_grad()
    (loss_of(model) * 64).backward()
    for weight in model.parameters():
        weight.grad = weight.grad / 64
    optimizer.step()


def evaluates(model, optimizer):
    with torch.no_grad():
        loss_of(model)
    with_block(model, optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("work", [first_step, by_hand, taken, replaced, evaluates, with_block])
def test_healthy_loops_are_silent(work, level):
    both = made(level)
    assert said(lambda: [work(*both) for _ in range(3)]) == []


def test_torchs_grad_scaler_around_o1_is_silent():
    model, optimizer = made("O1")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def work():
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(optimizer)
            scaler.update()

    assert said(work) == []


def test_a_second_optimizer_in_float32_is_silent():
    """Of another model, which is trained without blocks beside the one that has them."""
    torch.manual_seed(0)
    models = [nn.Linear(8, 4), nn.Linear(8, 4)]
    own = torch.optim.SGD(models[1].parameters(), lr=0.1)
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    amp.initialize(models[0], optimizer, opt_level="O2", verbosity=0)

    def work():
        for _ in range(3):
            own.zero_grad()
            models[1](torch.ones(4, 8, device="cpu")).sum().backward()
            own.step()
            optimizer.step()

    assert said(work) == []


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_levels_without_a_loss_scale_are_silent(level):
    both = made(level)
    assert said(lambda: [without(*both) for _ in range(3)]) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("level", "scale"), [("O1", 1e9), ("O2", 1e9), ("O3", 1e9)])
def test_a_static_scale_that_is_too_large_is_told_once(level, scale, kind):
    both = made(level, kind if level != "O3" else torch.optim.SGD, loss_scale=scale)
    found = said(lambda: [with_block(*both) for _ in range(20)])
    assert len(found) == 1
    assert STATIC in found[0]
    assert "1e+09" in found[0]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_static_scale_that_fits_is_silent(level):
    both = made(level, torch.optim.SGD, loss_scale=128.0)
    assert said(lambda: [with_block(*both) for _ in range(40)]) == []


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale():
    model, optimizer = made("O1", loss_scale=128.0)

    def work():
        with amp.scale_loss(loss_of(model) * float("nan"), optimizer) as scaled:
            scaled.backward()

    assert said(work) == []


def test_the_flag_of_a_device_is_read_when_it_has_arrived():
    """Nothing waits: it is told in a later block."""
    from apex.amp.unnoticed import Unnoticed

    class Late:
        arrives, looks = True, 0

        def read(self):
            self.looks += 1
            return [1.0] if self.looks > 1 else None

    unnoticed, weight = Unnoticed(), nn.Parameter(torch.ones(2, device="cpu"))
    weight.grad = torch.ones(2, device="cpu")
    unnoticed.sent = Late()
    look = lambda: unnoticed.look_at(8.0, weight.sum(), [weight], lambda flag: None)  # noqa: E731
    assert said(look) == []
    found = said(look)
    assert len(found) == 1
    assert STATIC in found[0]
