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
