"""Weights that somebody else writes between steps, stored with a column beside them."""

import copy
from functools import partial

import pytest
import torch

from apex.ops import _runtime
from apex.ops.lists.storage import join_bits
from apex.optimizers import FusedAdam
from tests.optimizers import common
from tests.optimizers.common import (
    EVERY,
    WITH_MASTERS,
    parameters,
    same,
    started,
    train,
    values,
)

SMALL = ((7,), (33, 5))
COLUMNS = {"low_bits": "low_bits", "kahan": "error"}
storages = pytest.mark.parametrize("storage", COLUMNS)
both_paths = pytest.mark.parametrize("path", ["reference", "triton"])


def zero(params):
    for param in params:
        param.zero_()


def prune(params):
    for param in params:
        param.mul_(torch.arange(param.numel()).view(param.shape) % 2)


def load(params):
    model = torch.nn.ParameterList(params)
    model.load_state_dict({str(i): torch.full_like(p, 0.3) for i, p in enumerate(params)})


def trained(storage, make=EVERY["FusedAdam"], path="reference"):
    params, optimizer = started(make, torch.bfloat16, SMALL, storage=storage, steps=3, path=path)
    return params, optimizer


def columns(optimizer, params):
    return [optimizer.state[param][COLUMNS[optimizer.storage]] for param in params]


CASES = [(make, "reference", load) for make in EVERY.values()]
CASES += [(EVERY["FusedAdam"], "reference", write) for write in (zero, prune)]
CASES += [(EVERY["FusedAdam"], "triton", write) for write in (zero, prune, load)]


@storages
@pytest.mark.parametrize(("make", "path", "write"), CASES)
def test_a_written_weight_is_stepped_as_it_was_written(make, storage, path, write):
    params, optimizer = trained(storage, make, path)
    expected = copy.deepcopy(optimizer)
    others = [param for group in expected.param_groups for param in group["params"]]
    for column in columns(expected, others):
        column.zero_()
    with torch.no_grad():
        write(params)
        write(others)
    found = train(optimizer, params, range(3, 5), path)
    assert same(found, train(expected, others, range(3, 5), path))
    assert all(value.isfinite().all() for value in found)
    assert same(columns(optimizer, params), columns(expected, others))


@storages
def test_only_the_weight_that_was_written_forgets(storage):
    params, optimizer = trained(storage)
    _, expected = trained(storage)
    params[1].grad = None
    with torch.no_grad():
        params[0].zero_()
    optimizer.step()
    others = expected.param_groups[0]["params"]
    assert torch.equal(columns(optimizer, params)[1], columns(expected, others)[1])
    assert columns(optimizer, params)[1].any()


@storages
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: o], ids=["deepcopy", "state_dict"])
def test_what_is_stale_is_not_saved(storage, copied):
    params, optimizer = trained(storage)
    with torch.no_grad():
        params[0].zero_()
    states = copied(optimizer).state_dict()["state"]
    assert not states[0][COLUMNS[storage]].any()
    assert states[1][COLUMNS[storage]].any()


@storages
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("stepped_before", [True, False])
def test_a_checkpoint_loads_in_any_order(storage, model_first, stepped_before):
    params, optimizer = trained(storage)
    saved, kept = copy.deepcopy(optimizer.state_dict()), values(params)
    expected = train(optimizer, params, range(3, 6))
    others = parameters(torch.bfloat16, SMALL, seed=1)
    resumed = EVERY["FusedAdam"](others, storage=storage)
    if stepped_before:
        train(resumed, others, range(2))

    if model_first:
        common.copy_into(others, kept)
    resumed.load_state_dict(saved)
    if not model_first:
        common.copy_into(others, kept)
    assert same(train(resumed, others, range(3, 6)), expected)


@both_paths
def test_a_zero_behind_autograds_back_is_zero(path):
    """A write through .data moves no version; with negative low bits it was nan."""
    params, optimizer = trained("low_bits", path=path)
    assert any(column.lt(0).any() for column in columns(optimizer, params))
    optimizer.param_groups[0]["lr"] = 0.0
    for param in params:
        param.data.zero_()
    common.take_step(path, optimizer)
    assert all(torch.equal(param, torch.zeros_like(param)) for param in params)


def test_zeros_of_either_sign_ignore_negative_low_bits():
    high = torch.tensor([0.0, -0.0, 0.0, 1.0], dtype=torch.bfloat16)
    low = torch.tensor([-1, -5, 3, -(2**15)], dtype=torch.int16)
    bits = [0, -(2**31), 3, 0x3F7F8000]
    assert join_bits(high, low).view(torch.int32).tolist() == bits


def test_a_graph_does_not_forget_at_each_replay(monkeypatch):
    params, optimizer = trained("low_bits", partial(FusedAdam, capturable=True))
    monkeypatch.setattr(_runtime, "capturing", lambda: True)
    optimizer.step()
    with torch.no_grad():
        params[0].zero_()
    with pytest.raises(RuntimeError, match="Make a step before capturing"):
        optimizer.step()


MASTERED = [partial(make, lr=1e-3, **options) for make, options in WITH_MASTERS.items()]
mastered = pytest.mark.parametrize("make", MASTERED)


def masters(optimizer, params):
    return [optimizer.state[param]["master_param"].clone() for param in params]


@mastered
def test_masters_follow_what_is_written(make):
    params, optimizer = started(make, torch.bfloat16, SMALL, steps=3)
    before = masters(optimizer, params)
    with torch.no_grad():
        params[0][2:4] = 0.3
    optimizer.state_dict()
    after = masters(optimizer, params)
    assert after[0][2:4].tolist() == params[0][2:4].tolist()
    after[0][2:4] = before[0][2:4]
    assert same(before, after)


@mastered
def test_masters_keep_their_bits_where_weights_come_back(make):
    """As with averaged weights, which are put in for an evaluation."""
    params, others = parameters(torch.bfloat16, SMALL), parameters(torch.bfloat16, SMALL)
    optimizer, plain = make(params), make(others)
    train(optimizer, params, range(3))
    train(plain, others, range(3))
    kept = values(params)
    load(params)
    common.copy_into(params, kept)
    assert same(train(optimizer, params, range(3, 5)), train(plain, others, range(3, 5)))


@mastered
@pytest.mark.parametrize("model_first", [True, False])
def test_masters_and_models_load_in_any_order(make, model_first):
    params, optimizer = started(make, torch.bfloat16, SMALL, steps=3)
    saved, kept = copy.deepcopy(optimizer.state_dict()), values(params)
    expected = train(optimizer, params, range(3, 5))
    resumed = make(params)  # of a model that goes on from its checkpoint
    train(resumed, params, range(2))
    for is_model in (model_first, not model_first):
        if not is_model:
            resumed.load_state_dict(saved)
            continue
        common.copy_into(params, kept)
    assert same(train(resumed, params, range(3, 5)), expected)


def test_nothing_is_noted_without_a_column():
    params, optimizer = started(FusedAdam, torch.bfloat16, SMALL, steps=1)
    assert not optimizer._written


@pytest.mark.parametrize("storage", [*COLUMNS, "stochastic"])
def test_a_model_of_another_dtype_needs_a_new_optimizer(storage):
    params, optimizer = trained(storage)
    model = torch.nn.ParameterList(params).float()
    before, saved = values(params), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"has torch\.float32.* make a new optimizer"):
        train(optimizer, params, range(1))
    assert same(before, values(params))
    assert str(optimizer.state_dict()) == str(saved)
    new = EVERY["FusedAdam"](params)
    new.load_state_dict(saved)
    assert not same(before, train(new, params, range(3, 4)))
    assert {param.dtype for param in params} == {torch.float32}
    assert not {*COLUMNS.values()} & {*new.state[params[0]]}
    model.bfloat16()
    train(optimizer, params, range(3, 4))
