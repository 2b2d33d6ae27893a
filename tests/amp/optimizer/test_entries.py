"""``optimizer.state`` by weight and by master, and wrappers without ``Optimizer.__init__``."""

import copy
import pickle
from collections import defaultdict

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp.entries import SharedState
from apex.optimizers import FusedAdam

KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.125),
}
kinds = pytest.mark.parametrize("kind", KINDS)
levels = pytest.mark.parametrize("level", ["O2", "O5"])


def started(kind, level):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = KINDS[kind](model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)


def step(model, optimizer):
    with amp.scale_loss(model(torch.ones(1, 3)).float().sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def names(optimizer):
    return {*optimizer.state_dict()["state"][0]} - {"step"}


@kinds
@levels
def test_what_a_program_writes_at_a_weight_is_at_its_master(kind, level):
    model, optimizer = started(kind, level)
    weight, master = model.weight, optimizer.param_groups[0]["params"][0]
    optimizer.state[weight]["early"] = 1  # before the first step
    assert optimizer.state[master]["early"] == 1
    step(model, optimizer)
    slots = {*optimizer.state[master]} - {"early", "step"}
    assert slots
    optimizer.state[master]["late"] = torch.ones(2)
    assert optimizer.state[weight] is optimizer.state[master]
    assert optimizer.state.get(weight) is optimizer.state.get(master)
    assert weight in optimizer.state
    assert names(optimizer) == {*slots, "early", "late"}
    assert len(optimizer.state) == len(optimizer.state_dict()["state"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[weight]["late"].tolist() == [1.0, 1.0]
    optimizer.state[weight] = {**optimizer.state[master], "other": 3}
    step(model, optimizer)
    assert names(optimizer) == {*slots, "early", "late", "other"}
    amp.reset()
    assert type(optimizer.state) is defaultdict
    assert optimizer.state[weight]["other"] == 3
    assert master not in optimizer.state


@levels
def test_a_tensor_that_is_no_weight_of_the_optimizer_has_an_entry_of_its_own(level):
    model, optimizer = started("SGD", level)
    other = nn.Parameter(torch.ones(2, dtype=model.weight.dtype))
    assert other not in optimizer.state
    assert optimizer.state.get(other, "none") == "none"
    optimizer.state[other]["before"] = 1
    assert optimizer.state[model.bias] == {}
    optimizer.add_param_group({"params": [other]})  # and now a master
    assert optimizer.state[other] == {"before": 1}
    assert optimizer.state[optimizer.param_groups[1]["params"][0]] == {"before": 1}


def test_copies_are_plain():
    model, optimizer = started("SGD", "O5")
    step(model, optimizer)
    assert type(optimizer.state) is SharedState
    for make in (copy.copy, copy.deepcopy, dict.copy, lambda x: x.copy()):
        assert type(make(optimizer.state)) in (defaultdict, dict)
    assert type(pickle.loads(pickle.dumps(optimizer)).state) is defaultdict


class Lookahead(torch.optim.Optimizer):
    """As written in 2019: without ``Optimizer.__init__``, with the groups of what it wraps."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)
        self.fast_state = optimizer.state

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for fast in group["params"]:
                state = self.state[fast]
                slow = state.setdefault("slow", torch.zeros_like(fast.data))
                fast.data.copy_(slow.add_(fast.data - slow, alpha=0.5))
        return loss


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_wrapper_without_the_base_class_s_constructor(level):
    """Steps are those of the same wrapper with it; torch's own methods work on it then."""
    found = []
    for completes in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        optimizer = Lookahead(inner)
        if completes:
            torch.optim.Optimizer.__init__(optimizer, inner.param_groups, {})
            optimizer.param_groups = inner.param_groups
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0
        )
        for _ in range(3):
            step(model, optimizer)
        masters = [*amp.master_params(optimizer)]
        for weight, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(weight, master.to(weight.dtype))
            assert "slow" in optimizer.state[weight]
        assert len(optimizer.state_dict()["state"]) == 2
        assert optimizer.fast_state is inner.state
        found.append([master.detach().clone() for master in masters])
    assert all(map(torch.equal, *found))
