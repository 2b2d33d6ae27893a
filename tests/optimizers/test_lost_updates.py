"""A fused optimizer that loses the updates of bfloat16 weights says so, once."""

import copy
import pickle
import warnings

import pytest
import torch

from apex import amp
from apex.optimizers import FusedAdam, FusedMuon, FusedSGD
from apex.optimizers._lost import STEPS
from apex.optimizers._step import gradients_of
from tests.optimizers.test_every_optimizer import every


def train(optimizer, model, steps=STEPS, step=None):
    """The warnings of some steps."""
    dtype = next(model.parameters()).dtype
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 32).to(dtype)).float().square().mean().backward()
            (step or optimizer.step)()
    return [str(one.message) for one in told]


def model_of(dtype=torch.bfloat16):
    return torch.nn.Linear(32, 32, bias=False, device="cpu", dtype=torch.float32).to(dtype)


def test_it_is_told_once_with_the_share_that_a_count_of_all_gives():
    model = model_of()
    optimizer = FusedAdam(model.parameters(), lr=1e-4)
    lost = there = 0
    for number in range(STEPS):
        before = model.weight.detach().clone()
        told = train(optimizer, model, 1)
        assert bool(told) == (number == STEPS - 1)
        moves = model.weight.grad != 0
        lost += int(((model.weight == before) & moves).sum())
        there += int(moves.sum())
    assert told == [
        f"FusedAdam: {100 * lost / there:.0f} % of the updates of bfloat16 weights were lost in "
        "its first 10 steps. Elements with a gradient did not move, because their updates are too "
        "small for the 8 bits of bfloat16. Keep the weights in float32 and compute in bfloat16 "
        "(torch.autocast, or amp at O4 or O5), or pass storage='auto', which keeps what is "
        "rounded away. Pass storage='plain' to keep it like this without the warning."
    ]
    assert train(optimizer, model, 2 * STEPS) == []


@every
def test_no_optimizer_is_silent(make):
    model = model_of()
    optimizer = make([*model.parameters()], lr=1e-12)
    name = type(optimizer).__name__
    has_storage = hasattr(optimizer, "storage") and not optimizer._mastered
    assert [text.partition(":")[0] for text in train(optimizer, model)] == [name] * has_storage


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"lr": 1e-4, "storage": "plain"}, torch.bfloat16),
        ({"lr": 1e-4, "storage": "low_bits"}, torch.bfloat16),
        ({"lr": 1e-4, "storage": "kahan"}, torch.bfloat16),
        ({"lr": 1e-4, "storage": "stochastic"}, torch.bfloat16),
        ({"lr": 1e-4, "master_weights": True, "capturable": True}, torch.bfloat16),
        ({"lr": 1e-4}, torch.float32),
        ({"lr": 0.0}, torch.bfloat16),
        ({"lr": 0.3}, torch.bfloat16),  # hardly any is lost
    ],
    ids=str,
)
def test_silent_where_it_was_chosen_or_nothing_is_lost(options, dtype):
    model = model_of(dtype)
    assert train(FusedAdam(model.parameters(), **options), model) == []


def test_under_amp_masters_are_stepped():
    model = model_of(torch.float32)
    model, optimizer = amp.initialize(
        model, FusedAdam(model.parameters(), lr=1e-4), opt_level="O5", verbosity=0
    )
    assert train(optimizer, model) == []


def test_steps_that_are_skipped_lose_nothing():
    model = model_of()
    optimizer = FusedSGD(model.parameters(), lr=0.3)

    before = model.weight.detach().clone()
    scaler = amp.GradScaler("cpu", init_scale=2.0)
    for number in range(2 * STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 32).bfloat16()).float().square().mean()
        scaler.scale(loss * (float("inf") if number % 2 else 1.0)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.step(optimizer)
        scaler.update()
    assert not torch.equal(model.weight, before)


def test_copies_and_pickles_look_at_nothing():
    model = model_of()
    optimizer = FusedAdam(model.parameters(), lr=1e-4)
    train(optimizer, model, 3)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.storage == "plain"
        assert type(other.storage) is str
        assert other._lost is None


def test_what_is_looked_at_is_bounded_and_spread():
    params = [torch.nn.Parameter(torch.ones(5_000, dtype=torch.bfloat16)) for _ in range(150)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = FusedSGD(params, lr=1e-6)
    samples = optimizer._lost.before(gradients_of(optimizer, None).active)
    assert 32 <= len(samples) <= 64
    assert all(len(sample.now) <= 1_024 for sample in samples)
    for _ in range(STEPS - 1):
        optimizer.step()
    with pytest.warns(UserWarning, match="FusedSGD: 100 % of the updates"):
        optimizer.step()


def test_a_group_of_muon_and_one_of_adam():
    model = model_of()
    groups = FusedMuon.groups_for(model, outputs=[])
    assert train(FusedMuon(groups, lr=1e-9), model)[0].startswith("FusedMuon: 100 %")
