"""Gradients that a skipped step has left behind: what programs do with them, and what amp says."""

import functools
import logging
import math

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import _speech
from apex.ops import _runtime
from apex.optimizers import FusedAdam, FusedSGD
from tests.amp.levels import LEVELS
from tests.amp.training import Delayed, block, copies, row, same, scaled_backward, started, value

MAKE = {"SGD": torch.optim.SGD, "FusedSGD": FusedSGD, "FusedAdam": FusedAdam}
DYNAMIC = {"loss_scale": "dynamic", "init_scale": 8.0}
BAD = 1  # the number of the pass that overflows


class Program:
    """A model, its optimizer, and batches of which one overflows."""

    def __init__(self, level, make):
        amp.reset()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        make = functools.partial(make, lr=0.05)
        options = {**DYNAMIC, "backoff_factor": 1.0}  # so that all scaled gradients have equal bits
        _, self.optimizer = started(level, self.model, make, **options)
        self.passes, self.taken = 0, []

    def backward(self, **options):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(self.passes))
        loss = (self.model(x).float() - 1).square().mean()
        self.one_pass(loss, self.passes == BAD, options)
        self.passes += 1

    def one_pass(self, loss, is_bad, options):
        scaled_backward(loss * math.inf if is_bad else loss, self.optimizer, **options)

    def step(self):
        before = copies(amp.master_params(self.optimizer))
        self.optimizer.step()
        after = copies(amp.master_params(self.optimizer))
        self.taken.append(amp.stepped(self.optimizer))
        assert self.taken[-1] or same(before, after)
        return self.taken[-1]

    def multiply(self, factor):
        for param in amp.master_params(self.optimizer):
            if param.grad is not None:
                param.grad *= factor


class Expected(Program):
    """The program that clears what the skipped step would have taken, without a step."""

    drops = has_stepped = False

    def one_pass(self, loss, is_bad, options):
        if self.has_stepped:
            self.drops = self.has_stepped = False
        if is_bad:
            self.optimizer.zero_grad()
            self.drops = True
        elif not self.drops:
            super().one_pass(loss, is_bad, options)

    def step(self):
        self.has_stepped = True
        if not self.drops:
            return super().step()
        self.taken.append(False)
        return False


def clears_after_a_taken_step(program):
    for number in range(5):
        if number == 0 or program.taken[-1]:
            program.optimizer.zero_grad()
        program.backward()
        program.step()


def repeats_a_batch_until_it_does_not_overflow(program):
    for _ in range(4):
        program.optimizer.zero_grad()
        program.backward()
        while not program.step():
            program.backward()


def steps_twice_for_one_backward(program):
    for _ in range(4):
        program.optimizer.zero_grad()
        program.backward()
        program.step()
        program.step()


def carries_gradients(program):
    for _ in range(4):
        program.backward()
        program.step()
        program.multiply(0.9)


def clears_by_a_product(program):
    for _ in range(4):
        program.backward()
        program.step()
        program.multiply(0)


def delays(program):
    for _ in range(3):
        program.backward(delay_unscale=True)
        program.backward()
        if program.step():
            program.optimizer.zero_grad()


IDIOMS = (
    clears_after_a_taken_step,
    repeats_a_batch_until_it_does_not_overflow,
    steps_twice_for_one_backward,
    carries_gradients,
    clears_by_a_product,
    delays,
)


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("decides", ["host", "device"])
def test_what_a_skipped_step_left_is_not_stepped(level, idiom, decides, request):
    if decides == "device":
        request.getfixturevalue("runs_behind")
    for name, make in MAKE.items():
        (taken, found), (expected_taken, expected) = [
            outcome(idiom, kind(level, make)) for kind in (Program, Expected)
        ]
        assert taken == expected_taken, name
        assert False in taken, name
        assert taken[-1], name
        assert all(bool(weight.isfinite().all()) for weight in found), name
        assert same(found, expected), name


def outcome(idiom, program):
    """Which steps were taken, and the weights at the end."""
    with _runtime.use("reference"):
        idiom(program)
    return program.taken, copies(amp.master_params(program.optimizer))


def test_sparse_gradients_of_a_skipped_step_are_dropped():
    model = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0, **DYNAMIC)
    for factor in (1.0, math.inf, 1.0):
        scaled_backward(factor * model(torch.tensor([1, 2, 1])).sum(), optimizer)
        optimizer.step()
        if amp.stepped(optimizer):
            optimizer.zero_grad()
    assert model.weight.tolist() == [[0.0, 0.0], [-4.0, -4.0], [-2.0, -2.0], [0.0, 0.0]]


# -- gradients that a program puts in place of those -----------------------------------------------


def cleared_by_hand(model):
    for param in model.parameters():
        param.grad = None


def after_a_skipped_step(level, decides, request):
    """A row at 0 whose step was skipped; and a loss of its weights alone, as of a penalty."""
    if decides == "device":
        request.getfixturevalue("runs_behind")
    model, optimizer = row(level, FusedSGD, **DYNAMIC)
    block(model, optimizer, math.inf)
    optimizer.step()
    assert value(model) == [0.0, 0.0]
    return model, optimizer, -2.0 * model.weight.sum()


@pytest.mark.parametrize("decides", ["host", "device"])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_plain_backward_after_a_skipped_step_is_stepped(level, decides, request):
    with _runtime.use("reference"):
        model, optimizer, penalty = after_a_skipped_step(level, decides, request)
        scaler = amp._amp_state.loss_scalers[0]
        cleared_by_hand(model)
        penalty.backward()
        optimizer.step()
        assert amp.stepped(optimizer)
        assert value(model) == [2.0, 2.0]
        assert scaler._unskipped == 0  # no pass was made
        optimizer.step()
        assert value(model) == [4.0, 4.0]


@pytest.mark.parametrize("decides", ["host", "device"])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_other_tensors_made_of_what_a_skipped_step_left_are_dropped_too(level, decides, request):
    with _runtime.use("reference"):
        model, optimizer, _ = after_a_skipped_step(level, decides, request)
        model.weight.grad = model.weight.grad * 0.5
        optimizer.step()
        assert not amp.stepped(optimizer)
        model.weight.grad = model.weight.grad * 0.5
        block(model, optimizer)
        optimizer.step()
        assert value(model) == [-1.0, -1.0]


# -- what amp says ---------------------------------------------------------------------------------


def two_losses(last, **options):
    """A row at O1 after a pass of each of two losses, with scales 8 and 4; one is not finite."""
    model, optimizer = row("O1", FusedSGD, num_losses=2, **DYNAMIC, **options)
    amp._amp_state.loss_scalers[1]._loss_scale = 4.0
    block(model, optimizer)
    block(model, optimizer, math.inf, loss_id=last)
    return model, optimizer


@pytest.mark.parametrize("decides", ["host", "device"])
def test_the_log_names_the_scaler_and_says_whose_gradients_they_are(
    decides, request, monkeypatch, capsys
):
    if decides == "device":
        request.getfixturevalue("runs_behind")
        monkeypatch.setattr(Delayed, "arrived", True)
    monkeypatch.setattr(_speech, "logger", logging.Logger("apex.amp"))  # without pytest's handlers
    with _runtime.use("reference"):
        model, optimizer = two_losses(1)
        optimizer._amp_stash.overflow.verbosity = 1
        optimizer.step()
        optimizer.step()
        block(model, optimizer)
        optimizer.step()  # lines of a device come at the step after theirs
    assert capsys.readouterr().out.splitlines() == [
        "Gradient overflow.  Skipping step, loss scaler 1 reducing loss scale to 2.0",
        "Gradients of a skipped step were not cleared.  Skipping step, loss scaler 1 keeping loss "
        "scale 2.0",
    ]
    assert value(model) == [-1.0, -1.0]


def test_the_error_after_skipped_steps_is_about_the_loss_that_was_not_finite():
    _, optimizer = two_losses(0, max_skipped_steps=1)
    with pytest.raises(RuntimeError, match="The loss itself was not finite"):
        optimizer.step()


def test_a_watch_is_told_the_scale_of_the_pass_and_each_step_once():
    class Watch:
        fault, told = None, []

        def stepped(self, optimizer, skipped, scale):
            self.told.append((skipped, scale))

    model, optimizer = two_losses(1)
    optimizer._amp_stash.observer = Watch()
    optimizer.step()
    optimizer.step()
    block(model, optimizer)
    optimizer.step()
    assert Watch.told == [(True, 4.0), (False, 8.0)]
