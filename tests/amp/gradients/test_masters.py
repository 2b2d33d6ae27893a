"""Float32 masters and what programs do around them: right, or refused, never silently nothing."""

import contextlib
import functools

import pytest
import torch
from torch import nn

from apex import amp
from apex.ops import _runtime
from tests.amp.training import MASTERED, block, row, scaled_backward, step, value

mastered = pytest.mark.parametrize("level", MASTERED)


# -- gradients on 16-bit weights -------------------------------------------------------------------


def test_master_params_of_a_model_are_refused():
    with pytest.raises(TypeError, match="was given Linear; pass the optimizer"):
        next(amp.master_params(nn.Linear(2, 2)))


@pytest.mark.parametrize("change", ["replace", "scale", "in place", "through data"])
@mastered
def test_an_edit_of_the_copy_on_the_weight_has_no_effect_and_warns(level, change):
    model, optimizer = row(level)
    block(model, optimizer)
    weight = model.weight
    if change in ("replace", "scale"):
        weight.grad = weight.grad * (1.0 if change == "replace" else 0.5)
    else:
        (weight.grad if change == "in place" else weight.grad.data).mul_(0.5)
    warns = pytest.warns(UserWarning, match="This has no effect")
    # what is written through data leaves no trace
    with contextlib.nullcontext() if change == "through data" else warns:
        optimizer.step()
    assert value(model) == [-1.0, -1.0]


READERS = {
    "step": lambda model, optimizer: optimizer.step(),
    "closure": lambda model, optimizer: optimizer.step(lambda: model(torch.ones(1, 2)).sum()),
    "clipping": lambda model, optimizer: amp.clip_grad_norm_(optimizer, 1.0),
    "block": lambda model, optimizer: scaled_backward(model.weight.sum(), optimizer),
}


@pytest.mark.parametrize("reader", READERS)
def test_the_warning_of_an_edit_names_the_line_of_the_program(reader):
    model, optimizer = row("O2", loss_scale=8.0)
    block(model, optimizer)
    model.weight.grad = model.weight.grad * 0.5
    with pytest.warns(UserWarning, match="This has no effect") as caught:
        READERS[reader](model, optimizer)
    program = scaled_backward.__code__.co_filename if reader == "block" else __file__
    assert [warning.filename for warning in caught] == [program]


@mastered
def test_an_edited_copy_is_not_accumulated_by_a_pass_without_a_forward(level):
    model, optimizer = row(level)
    out = model(torch.ones(1, 2)).sum()
    with amp.scale_loss(out, optimizer) as scaled:
        scaled.backward(retain_graph=True)
    model.weight.grad = model.weight.grad * 3.0
    with pytest.warns(UserWarning, match="This has no effect"):
        scaled_backward(out, optimizer)
    optimizer.step()
    assert value(model) == [-2.0, -2.0]


@mastered
def test_a_replaced_copy_is_gone_with_the_next_forward(level):
    model, optimizer = row(level)
    block(model, optimizer)
    model.weight.grad = model.weight.grad * 0.5
    model(torch.full((1, 2), 2.0)).sum().backward()  # outside of a block: unscaled
    optimizer.step()
    assert value(model) == [-3.0, -3.0]


@pytest.mark.parametrize("path", [None, "triton"])
def test_only_float32_weights_are_trained(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=8.0)
    with _runtime.use(path) if path else contextlib.nullcontext():
        scaled_backward(model(torch.randn(4, 2)).sum(), optimizer)
        optimizer.step()
    assert model[1].bias.grad is not None


# -- one model, two initialize calls ---------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [("O2", "O2"), ("O2", "O1"), ("O1", "O2")])
def test_an_optimizer_whose_model_was_initialised_without_it_is_refused(first, second):
    model, one = row(first)
    two = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, two, opt_level=second, loss_scale=8.0, verbosity=0)
    out = model(torch.ones(1, 2)).sum()
    with pytest.raises(RuntimeError, match="Pass both optimizers"), amp.scale_loss(out, one):
        pass
    with pytest.raises(RuntimeError, match="Pass both optimizers"):
        one.step()
    step(model, two)
    assert value(model) == [-1.0, -1.0]
    amp.initialize(model, [one, two], opt_level=second, loss_scale=8.0, verbosity=0)
    for optimizer in (one, two):
        optimizer.zero_grad()
        step(model, optimizer)
    assert value(model) == [-3.0, -3.0]


def test_without_masters_two_calls_add_up():
    model, one = row("O1")
    two = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, two, opt_level="O1", loss_scale=8.0, verbosity=0)
    for optimizer in (one, two):
        optimizer.zero_grad()
        step(model, optimizer)
    assert value(model) == [-2.0, -2.0]


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("clamp", ["data", "no_grad"])
@pytest.mark.parametrize("level", ["O1", *MASTERED])
def test_reading_changes_nothing(level, clamp):
    def read(everything):
        if everything:
            model.state_dict()
            amp.state_dict()
            list(amp.master_params(optimizer))
            optimizer.state_dict()

    ends = []
    for everything in (False, True):
        model, optimizer = row(level, functools.partial(torch.optim.SGD, momentum=0.9), lr=1e-4)
        for _ in range(3):
            optimizer.zero_grad()
            block(model, optimizer, delay_unscale=True)
            read(everything)
            block(model, optimizer)
            read(everything)
            optimizer.step()
            read(everything)
            with torch.no_grad():
                weight = model.weight.data if clamp == "data" else model.weight
                weight.clamp_(-1.5e-4, 1.5e-4)
            read(everything)
        # masters first: value() reads too
        ends.append([[p.tolist() for p in amp.master_params(optimizer)], value(model)])
    assert ends[0] == ends[1]


@mastered
def test_masters_require_gradients_where_their_weights_do(level):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    required = [p.requires_grad for p in optimizer.param_groups[0]["params"]]
    assert required == [False, False, True, True]
    model[0].requires_grad_(True)
    assert all(p.requires_grad for p in amp.master_params(optimizer))


@mastered
def test_reading_a_distributed_checkpoint_changes_nothing(level):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = row(level)
    block(model, optimizer, delay_unscale=True)
    get_state_dict(model, optimizer)
    block(model, optimizer)
    get_state_dict(model, optimizer)
    optimizer.step()
    assert value(model) == [-2.0, -2.0]


@mastered
def test_the_step_that_makes_state_for_a_checkpoint_is_not_counted(level):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = row(level)
    get_state_dict(model, optimizer)
    assert amp.outcome(optimizer).numbers()[:3] == (False, 0, 0)
