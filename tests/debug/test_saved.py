"""A watched model is saved, pickled and copied as without a watch: bytes, attributes, hooks."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from apex import debug
from tests.debug.planted import watching


class Own(nn.Sequential):
    """Saves all of its attributes."""

    def __getstate__(self):
        return dict(vars(self))


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def trained(watched, kind=nn.Sequential):
    """Model, optimizer and scaler after a step that is (or is not) watched, and its output."""
    torch.manual_seed(0)
    model = kind(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if watched:
        debug.watch(model, optimizer, scaler=scaler, on_fault="raise")
    output = model(torch.ones(3, 4))
    scaler.scale(output.mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    return model, optimizer, scaler, output


def test_what_is_written_is_equal_byte_for_byte():
    plain, watched = trained(watched=False), trained(watched=True)
    for alone, other in zip(plain[:3], watched[:3], strict=True):
        assert saved(alone) == saved(other)


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_plain_model(clone):
    model, _, scaler, _ = trained(watched=True)
    other = clone(model)
    assert set(vars(other)) == set(vars(nn.Sequential()))
    assert not any(vars(other)[name] for name in vars(other) if "hooks" in name and name[0] == "_")
    assert set(vars(clone(scaler))) == set(vars(torch.amp.GradScaler("cpu")))
    assert torch.equal(other(torch.ones(3, 4)), model(torch.ones(3, 4)))


def test_a_model_that_saves_all_of_its_attributes_is_saved():
    model = trained(watched=True, kind=Own)[0]
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(other(torch.ones(3, 4)), model(torch.ones(3, 4)))
        with torch.no_grad():
            other[0].weight.zero_()
        assert not torch.equal(other(torch.ones(3, 4)), model(torch.ones(3, 4)))


def test_an_output_is_saved_without_a_warning():
    output = trained(watched=True)[3]
    assert saved(output) == saved(trained(watched=False)[3])


def test_hooks_of_the_program_stay_and_are_removed_by_their_handles():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    first = model.register_forward_pre_hook(lambda *_: seen.append("before"))
    with debug.watch(model, optimizer):
        second = model.register_forward_hook(lambda *_: seen.append("after"))
        model(torch.ones(2, 4))
        first.remove()
        model(torch.ones(2, 4))
        second.remove()
        model(torch.ones(2, 4))
    assert seen == ["before", "after", "after"]


class Prompt(nn.Linear):
    """Its output is its parameter."""

    def forward(self):
        return self.weight


def test_no_hook_stays_on_a_parameter_that_a_forward_returns():
    model = Prompt(1, 3)
    with watching(model) as (optimizer, _):
        for _ in range(3):
            model().sum().backward()
            optimizer.step()
        assert not model.weight._backward_hooks
        model()
    assert not model.weight._backward_hooks


def test_a_module_that_the_program_compiles_later_is_left_to_it():
    model = nn.Linear(4, 1)
    with watching(model) as (optimizer, _):
        model.compile(backend="eager")
        compiled = model._compiled_call_impl
    assert model._compiled_call_impl is compiled


def test_a_compiled_model_warns_of_no_hooks_in_a_watch():
    """torch.compile warns where hooks for all modules exist: warnings are errors here."""
    model = torch.compile(nn.Linear(4, 1), backend="eager")
    with watching(model) as (optimizer, watch):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert watch.steps == 1
