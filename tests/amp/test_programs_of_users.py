"""Loops that a fresh pair of eyes tried: as at O0, or refused."""

import contextlib
import math

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp.gradients import ledger as ledgers
from apex.ops import _runtime
from apex.optimizers import FusedSGD

LEVELS = ["O0", "O1", "O2", "O5"]
MASTERED = ["O2", "O5"]


def start(level, make=torch.optim.SGD, count=1, **options):
    """One weight row of zeros; its gradient is the input."""
    amp.reset()
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    made = [make(model.parameters(), lr=1.0) for _ in range(count)]
    options = {"loss_scale": 8.0, **options}
    return amp.initialize(model, made, opt_level=level, verbosity=0, **options)


def block(model, optimizer, x=1.0, **options):
    with amp.scale_loss(model(torch.full((1, 2), x)).sum(), optimizer, **options) as scaled:
        scaled.backward()


def value(model):
    return model.state_dict()["weight"].flatten().tolist()


# -- gradients that the program clears -------------------------------------------------------------


@pytest.mark.parametrize("how", ["zero_grad", "zeros", "none"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_that_the_program_drops(level, how):
    model, (optimizer,) = start(level)
    block(model, optimizer, 10.0)
    if how == "none":
        model.weight.grad = None
    else:
        model.zero_grad(set_to_none=how == "zero_grad")
    block(model, optimizer)
    optimizer.step()
    assert value(model) == [-1.0, -1.0]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_overflow_goes_with_the_batch_that_the_program_drops(level):
    model, (optimizer,) = start(level, loss_scale="dynamic", init_scale=8.0)
    block(model, optimizer, math.inf)
    model.zero_grad()
    block(model, optimizer)
    optimizer.step()
    assert value(model) == [-1.0, -1.0]


@pytest.mark.parametrize("level", LEVELS)
def test_two_tasks_in_turn_share_a_weight(level):
    """An optimizer that does not step keeps no gradients for the other one's next pass."""
    model, pair = start(level, count=2)
    for step in range(4):
        model.zero_grad()
        block(model, pair[step % 2])
        pair[step % 2].step()
    assert value(model) == [-4.0, -4.0]


def test_an_idle_optimizer_does_not_collect_passes_without_end(monkeypatch):
    monkeypatch.setattr(ledgers, "_MOST_PASSES", 3)
    model, (busy, idle) = start("O1", count=2, loss_scale="dynamic", init_scale=8.0)
    for _ in range(10):
        model.zero_grad()
        block(model, busy)
        busy.step()
    assert len(idle._amp_stash.ledger.passes) == 4


# -- errors on the way -----------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_an_error_out_of_the_step_ends_the_step(level, fused):
    """A post-hook or Ctrl-C comes after the weights were stepped."""
    model, (optimizer,) = start(level, FusedSGD, fused_step=fused)
    errors = iter([KeyboardInterrupt, None, KeyboardInterrupt, None])

    def hook(optimizer, args, kwargs):
        error = next(errors)
        if error:
            raise error

    optimizer.register_step_post_hook(hook)
    for _ in range(4):
        model.zero_grad()
        block(model, optimizer)
        with contextlib.suppress(KeyboardInterrupt):
            optimizer.step()
    assert value(model) == [-4.0, -4.0]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_no_memory_for_unscaling(level, monkeypatch):
    model, (optimizer,) = start(level)
    block(model, optimizer)

    def no_memory(*args):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ledgers, "unscale_into", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            block(model, optimizer, 5.0)
    optimizer.step()  # the pass before
    assert value(model) == [-1.0, -1.0]
    optimizer.zero_grad()
    block(model, optimizer)
    optimizer.step()
    assert value(model) == [-2.0, -2.0]


# -- other optimizers ------------------------------------------------------------------------------


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as it is published: two passes, and a step of the base."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def second_step(self):
        self.base.step()


def test_a_step_of_the_optimizer_inside_is_skipped_after_an_overflow():
    model, (optimizer,) = start("O1", SAM, loss_scale="dynamic", init_scale=8.0)
    for x in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        block(model, optimizer, x)
        optimizer.second_step()
        assert amp.stepped(optimizer) == math.isfinite(x)
    assert value(model) == [-2.0, -2.0]
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 4.0, "unskipped": 1}


class Waiting(torch.optim.Optimizer):
    """Changes nothing for its first steps, as some variants of RAdam do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if self.calls > 5:
                    param.sub_(param.grad)


@pytest.mark.parametrize("level", MASTERED)
def test_an_optimizer_may_wait_some_steps(level):
    model, (optimizer,) = start(level, Waiting)
    for _ in range(7):
        optimizer.zero_grad()
        block(model, optimizer)
        optimizer.step()
    assert value(model) == [-2.0, -2.0]


@pytest.mark.parametrize("level", MASTERED)
def test_an_optimizer_that_never_changes_anything_is_refused(level):
    model, (optimizer,) = start(level, Waiting)
    optimizer.calls = -100
    for _ in range(9):
        block(model, optimizer)
        optimizer.step()
    block(model, optimizer)
    with pytest.raises(RuntimeError, match="did not change the float32 masters"):
        optimizer.step()


def test_one_block_for_optimizers_of_several_trainings():
    model, (first,) = start("O1", loss_scale="dynamic")
    other = nn.Linear(2, 1)
    second = torch.optim.SGD(other.parameters(), lr=1.0)
    amp.initialize(other, second, opt_level="O4", verbosity=0)
    loss = model(torch.ones(1, 2)).sum() + other(torch.ones(1, 2)).sum()
    for listed in ([first, second], [second, first]):
        with (
            pytest.raises(RuntimeError, match="several amp.initialize calls"),
            amp.scale_loss(loss, listed),
        ):
            pass


@pytest.mark.parametrize("path", [None, "triton"])
@pytest.mark.parametrize("level", MASTERED)
def test_only_float32_weights_are_trained(level, path):
    amp.reset()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    with _runtime.use(path) if path else contextlib.nullcontext():
        with amp.scale_loss(model(torch.randn(4, 2)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert model[1].bias.grad is not None


@pytest.mark.parametrize("level", ["O0", *MASTERED])
def test_reading_a_distributed_checkpoint_changes_nothing(level):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, (optimizer,) = start(level)
    block(model, optimizer, delay_unscale=True)
    get_state_dict(model, optimizer)
    block(model, optimizer)
    get_state_dict(model, optimizer)
    optimizer.step()
    assert value(model) == [-2.0, -2.0]
