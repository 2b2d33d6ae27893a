"""Calls and conversions past the hooks of an initialised model: right, or amp's own text."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from tests.amp import levels
from tests.amp.levels import LEVELS, MODEL
from tests.amp.training import scaled_backward, sgd, started


def start(level, kind=nn.Sequential):
    return levels.cast(level, kind(nn.Linear(4, 8), nn.Linear(8, 2)))


class OwnCall(nn.Sequential):
    def __call__(self, x):
        return self.forward(x)


class Parts(nn.Sequential):
    def encode(self, x):
        return self[0](x)


@pytest.mark.parametrize(
    "call", [lambda m, x: m.forward(x), lambda m, x: m[0](x), lambda m, x: m.encode(x)]
)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_forward_by_name_is_refused_until_the_first_call(level, call):
    x, made = torch.ones(2, 4), start(level, Parts)
    for model in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made):
        match = r"model\.forward\(x\).*model\.encode\(x\).*Call model\(x\).*\[model\.encoder, "
        with pytest.raises(RuntimeError, match=match):
            call(model, x)
        y = model(x)
        assert not any(layer._forward_pre_hooks for layer in model)
        assert torch.equal(model.forward(x.to(model[0].weight.dtype)).float(), y)


@pytest.mark.parametrize("level", LEVELS)
def test_parts_that_are_initialised_instead_can_be_called(level):
    """What the error advises for programs that call ``model.encode(x)``."""
    model = Parts(nn.Linear(4, 8), nn.Linear(8, 2))
    _, optimizer = started(level, list(model), sgd(model.parameters()))
    scaled_backward(model.encode(torch.ones(2, 4)).float().sum(), optimizer)
    optimizer.step()
    assert model(torch.ones(2, 4)).shape == (2, 2)


@pytest.mark.parametrize("level", LEVELS)
def test_a_call_of_the_models_own(level):
    model, x = start(level, OwnCall), torch.ones(2, 4)
    if level in MODEL:
        with pytest.raises(RuntimeError, match=r"leave __call__ to nn\.Module"):
            model(x)
        x = x.to(model[0].weight.dtype)
    assert model(x).dtype == levels.HALF.get(level, x.dtype)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_scripting_is_refused(level):
    with pytest.raises(RuntimeError, match=r"Use torch\.jit\.trace or torch\.compile"):
        torch.jit.script(start(level))


@pytest.fixture
def _swaps():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("_swaps")
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_conversions_that_swap_weights(level):
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = started(level, model, functools.partial(sgd, lr=0.5), loss_scale=8.0)
    for _ in range(2):
        model.load_state_dict({"weight": torch.zeros(1, 2)})
        model.double().float()
        scaled_backward(model(torch.ones(1, 2)).float().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert model.weight.tolist() == [[-0.5, -0.5]]


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_matrix_exp(level):
    """torch's own is undefined in 16 bits. The exponential of a nilpotent matrix is exact."""

    class Exponential(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))

        def forward(self, x):
            return x @ torch.matrix_exp(self.weight)

    model, eye = levels.cast(level, Exponential()), torch.eye(2)
    exact = [[1.0, 1.0], [0.0, 1.0]]
    assert model(eye).tolist() == exact
    half = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.bfloat16)
    assert torch.linalg.matrix_exp(half).tolist() == half.matrix_exp().tolist() == exact
    for function in (torch.matrix_exp, torch.linalg.matrix_exp, torch.Tensor.matrix_exp):
        function(model(eye)).float().sum().backward()
    assert torch.isfinite(model.weight.grad).all()
