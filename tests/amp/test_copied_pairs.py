"""An optimizer of another copy of the model is refused; other tensors of its own are not."""

import copy
import io

import pytest
import torch
from torch import nn

from apex import amp

LEVELS = ("O0", "O1", "O2", "O4", "O5")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def sgd(params):
    return torch.optim.SGD(params, lr=0.5)


def start(models, optimizers, level="O2"):
    return amp.initialize(models, optimizers, opt_level=level, verbosity=0, loss_scale=8.0)


def saved(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, saved])
@pytest.mark.parametrize("level", LEVELS)
def test_a_copied_pair(level, make_copy):
    model = network()
    model, optimizer = make_copy(start(model, sgd(model.parameters()), level))
    if level in ("O2", "O5"):
        with pytest.raises(ValueError, match="of another copy, or masters that were copied"):
            start(model, optimizer, level)
        before, optimizer = optimizer, sgd(model.parameters())
        optimizer.load_state_dict(before.state_dict())
    trains(model, *start(model, optimizer, level)[1:], level)


def trains(model, optimizer, level="O2", extra=0.0):
    before = model.state_dict()["0.weight"].clone()
    with amp.scale_loss(model(torch.ones(1, 3)).float().square().sum() + extra, optimizer) as s:
        s.backward()
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        one.step()
    assert not torch.equal(model.state_dict()["0.weight"], before)


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_of_another_copy(level):
    model = network()
    with pytest.raises(ValueError, match=r"Make an optimizer of this model's parameters\(\)"):
        start(copy.deepcopy(model), sgd(model.parameters()), level)


@pytest.mark.parametrize("shape", [(), (1, 3), (5, 2)])  # log_alpha, an image, a loss's centres
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_tensors_that_belong_to_no_model(level, shape):
    model, own = network(), torch.zeros(shape, requires_grad=True)
    optimizers = [sgd(model.parameters()), sgd([own])]
    start(model, optimizers, level)
    trains(model, optimizers, extra=own.sum())
    assert torch.equal(own.detach(), torch.full(shape, -0.5))


@pytest.mark.parametrize("passed", ["its optimizer", "itself"])
def test_a_target_network(passed):
    model, target = network(), network()
    optimizer = sgd(model.parameters())
    if passed == "itself":
        start([model, target], optimizer)
    else:
        start(model, [optimizer, sgd(target.parameters())])
    trains(model, optimizer)


def test_gan():
    pairs = [(model, sgd(model.parameters())) for model in (network(), network())]
    start([model for model, _ in pairs], [optimizer for _, optimizer in pairs])
    for model, optimizer in pairs:
        trains(model, optimizer)


def test_frozen_layers_and_a_subset():
    model = network()
    model[2].requires_grad_(False)
    trains(model, start(model, sgd(model[0].parameters()))[1])
    start(model, [sgd(model[0].parameters()), sgd(network()[0].parameters())])


def test_nothing_to_train():
    amp.initialize(nn.ReLU(), sgd([{"params": []}]), opt_level="O2", verbosity=0)
    amp.initialize(nn.LazyLinear(2), sgd(network().parameters()), opt_level="O1", verbosity=0)
