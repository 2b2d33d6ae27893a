"""torch.distributed.checkpoint's state dicts, of models and optimizers under amp."""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedAdam
from tests.amp.training import same, scaled_backward, started

pytestmark = pytest.mark.dist
MAKERS = [
    torch.optim.SGD,
    lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    torch.optim.Adam,
    FusedAdam,
]


def make(level, maker):
    amp.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    groups = [{"params": model[:2].parameters()}, {"params": model[2].parameters()}]
    return started(level, model, maker(groups, lr=0.01), loss_scale=128.0)


def train(model, optimizer, steps):
    for step in steps:
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        scaled_backward(model(inputs).float().square().mean(), optimizer)
        optimizer.step()
    return [p.detach().clone() for p in amp.master_params(optimizer)]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(
    ("level", "maker"),
    [("O0", MAKERS[3]), ("O1", MAKERS[0]), *(("O2", maker) for maker in MAKERS), ("O5", MAKERS[3])],
)
def test_a_resumed_run_is_the_run_bit_for_bit(level, maker, flatten):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = make(level, maker)
    train(model, optimizer, range(3))
    groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
    saved = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == groups
    straight_on = train(model, optimizer, range(3, 6))
    model, optimizer = make(level, maker)
    parts = dict(zip(("model_state_dict", "optim_state_dict"), saved, strict=True))
    set_state_dict(model, optimizer, **parts, options=options)
    assert same(train(model, optimizer, range(3, 6)), straight_on)


def test_torchs_functions_are_put_back():
    import torch.distributed.checkpoint.state_dict as module

    before = dict(vars(module))
    make("O1", torch.optim.SGD)
    assert vars(module) == before
    make("O2", torch.optim.SGD)
    changed = {name for name, value in vars(module).items() if before[name] is not value}
    assert changed >= {"_get_optim_state_dict", "_init_optim_state", "_split_optim_state_dict"}
    amp.reset()
    assert vars(module) == before
