"""Calls and conversions past the hooks of an initialised model: right, or amp's own text."""

import copy
import pickle

import pytest
import torch
from torch import nn

from apex import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


class OwnCall(nn.Sequential):
    def __call__(self, x):
        return self.forward(x)


def start(level, kind=nn.Sequential):
    model = kind(nn.Linear(4, 8), nn.Linear(8, 2))
    return amp.initialize(model, opt_level=level, verbosity=0)


@pytest.mark.parametrize("call", [lambda m, x: m.forward(x), lambda m, x: m[0](x)])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_forward_by_name_is_refused_until_the_first_call(level, call):
    x = torch.ones(2, 4)
    for model in (
        start(level),
        copy.deepcopy(start(level)),
        pickle.loads(pickle.dumps(start(level))),
    ):
        with pytest.raises(RuntimeError, match=r"model\.forward\(x\).*Call model\(x\)"):
            call(model, x)
        y = model(x)
        assert not any(layer._forward_pre_hooks for layer in model)
        assert torch.equal(model.forward(x.to(model[0].weight.dtype)).float(), y)


@pytest.mark.parametrize("level", LEVELS)
def test_a_call_of_the_models_own(level):
    model, x = start(level, OwnCall), torch.ones(2, 4)
    if level in ("O2", "O3", "O5"):
        with pytest.raises(RuntimeError, match=r"leave __call__ to nn\.Module"):
            model(x)
        x = x.to(model[0].weight.dtype)
    assert model(x).dtype == {"O4": torch.bfloat16, "O1": torch.float16}.get(level, x.dtype)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("level", LEVELS)
def test_scripting_is_refused(level):
    with pytest.raises(RuntimeError, match=r"Use torch\.jit\.trace or torch\.compile"):
        torch.jit.script(start(level))


@pytest.fixture
def _swaps():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("_swaps")
@pytest.mark.parametrize("level", LEVELS)
def test_conversions_that_swap_weights(level):
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"opt_level": level, "verbosity": 0, "loss_scale": 8.0}
    if level in ("O2", "O3", "O5"):
        with pytest.raises(RuntimeError, match=r"swap_module_params_on_conversion\(False\)"):
            amp.initialize(model, optimizer, **options)
        return
    amp.initialize(model, optimizer, **options)
    for _ in range(2):
        model.load_state_dict({"weight": torch.zeros(1, 2)})
        model.double().float()
        with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert model.weight.tolist() == [[-0.5, -0.5]]


class Exponential(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))

    def forward(self, x):
        return x @ torch.matrix_exp(self.weight)


@pytest.mark.parametrize("level", LEVELS)
def test_matrix_exp(level):
    """torch's own is undefined in 16 bits. The exponential of a nilpotent matrix is exact."""
    model, eye = amp.initialize(Exponential(), opt_level=level, verbosity=0), torch.eye(2)
    for function in (
        model,
        lambda x: torch.linalg.matrix_exp(model(x)),
        lambda x: model(x).matrix_exp(),
    ):
        before = amp.state_dict() and function
        function(eye).float().sum().backward()
    assert before is not None
    assert model(eye).tolist() == [[1.0, 1.0], [0.0, 1.0]]
    half = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.bfloat16)
    if level != "O0":
        assert torch.linalg.matrix_exp(half).tolist() == half.matrix_exp().tolist()
        assert half.matrix_exp().tolist() == [[1.0, 1.0], [0.0, 1.0]]
    assert torch.isfinite(model.weight.grad).all()
