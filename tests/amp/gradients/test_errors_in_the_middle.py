"""Errors in blocks and steps: everything is as before, and training goes on."""

import contextlib

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp.gradients import ledger as ledgers
from apex.optimizers import FusedSGD
from tests.amp.training import block, row, value


@pytest.mark.parametrize(
    ("level", "count", "match"),
    [
        ("O1", 1, "in an open scale_loss block already"),
        ("O1", 2, "shares a parameter"),
        ("O2", 2, "shares a parameter"),
    ],
)
def test_nested_blocks_that_share_parameters_are_refused(level, count, match):
    model, *optimizers = row(level, count=count)
    loss = model(torch.ones(1, 2)).sum()
    with amp.scale_loss(loss, optimizers[0]) as scaled:
        with pytest.raises(RuntimeError, match=match), amp.scale_loss(loss, optimizers[-1]):
            pass
        scaled.backward()
    optimizers[0].step()
    assert value(model) == [-1.0, -1.0]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_error_out_of_the_step_ends_the_step(level, fused):
    """A post-hook or Ctrl-C comes after the weights were stepped."""
    model, optimizer = row(level, FusedSGD, fused_step=fused)
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


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_memory_for_unscaling(level, delayed, monkeypatch):
    model, optimizer = row(level)
    block(model, optimizer, delay_unscale=delayed)

    def no_memory(*args, **options):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ledgers, "unscale_into", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            block(model, optimizer, 5.0)
    optimizer.step()  # the pass before, unless the one that failed continued it
    assert value(model) == ([0.0, 0.0] if delayed else [-1.0, -1.0])
    optimizer.zero_grad()
    before = value(model)[0]
    block(model, optimizer)
    optimizer.step()
    assert value(model) == [before - 1.0] * 2


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")  # torch advises against
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_graph_on_gradients_is_refused_where_they_are_unscaled(level):
    model, optimizer = row(level)
    nn.init.ones_(model.weight)
    loss = model(torch.ones(1, 2)).float().square().sum()
    raises = pytest.raises(RuntimeError, match="does not unscale their graph")
    with raises, amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward(create_graph=True)
    assert model.weight.grad is None
    optimizer.step()
    assert value(model) == [1.0, 1.0]
