"""An optimizer of another copy of the model is refused; other tensors of its own are not."""

import copy
import functools

import pytest
import torch
from torch import nn

from tests.amp.training import scaled_backward, sgd, started
from tests.checkpoints import reloaded


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def initialize(models, optimizers, level="O2"):
    return started(level, models, optimizers, loss_scale=8.0)


def trains(model, optimizer, extra=0.0):
    before = model.state_dict()["0.weight"].clone()
    scaled_backward(model(torch.ones(1, 3)).float().square().sum() + extra, optimizer)
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        one.step()
    assert not torch.equal(model.state_dict()["0.weight"], before)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, reloaded])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_copied_pair(level, make_copy):
    model, optimizer = make_copy(
        started(level, network(), functools.partial(sgd, lr=0.5), loss_scale=8.0)
    )
    if level == "O2":
        with pytest.raises(ValueError, match="to another copy, or are copied masters"):
            initialize(model, optimizer, level)
        before, optimizer = optimizer, sgd(model.parameters())
        optimizer.load_state_dict(before.state_dict())
    trains(*initialize(model, optimizer, level))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_optimizer_of_another_copy(level):
    model = network()
    with pytest.raises(ValueError, match=r"Make an optimizer of this model's parameters\(\)"):
        initialize(copy.deepcopy(model), sgd(model.parameters()), level)


@pytest.mark.parametrize("shape", [(), (1, 3), (5, 2)])  # log_alpha, an image, a loss's centres
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_tensors_that_belong_to_no_model(level, shape):
    model, own = network(), torch.zeros(shape, requires_grad=True)
    optimizers = [sgd(model.parameters()), sgd([own])]
    initialize(model, optimizers, level)
    trains(model, optimizers, extra=own.sum())
    assert torch.equal(own.detach(), torch.full(shape, -0.1))


def test_optimizers_of_other_models_and_of_parts():
    model, target = network(), network()  # a target network: its optimizer, or itself, is passed
    optimizer = sgd(model.parameters())
    initialize(model, [optimizer, sgd(target.parameters())])
    trains(model, optimizer)
    initialize([network(), target], sgd(target.parameters()))
    model = network()
    model[2].requires_grad_(False)
    trains(*initialize(model, sgd(model[0].parameters())))
    initialize(model, [sgd(model[0].parameters()), sgd(network()[0].parameters())])
    initialize(nn.ReLU(), sgd([{"params": []}]))
    initialize(nn.LazyLinear(2), sgd(network().parameters()), "O1")
