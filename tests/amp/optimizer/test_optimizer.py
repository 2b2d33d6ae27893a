"""What an initialised optimizer can still do."""

import contextlib
import copy
import functools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp.scaler import LossScaler
from apex.optimizers import FusedSGD
from tests.amp.training import (
    MASTERED,
    backward,
    batches,
    block,
    copies,
    net,
    row,
    same,
    scaled_backward,
    sgd,
    started,
    step,
    train,
    value,
)


def start(level, make=None, **options):
    return started(level, optimizer=make or functools.partial(sgd, momentum=0.9), **options)


@pytest.mark.parametrize("before", [True, False], ids=["scheduler first", "scheduler last"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_schedulers_stay_silent(level, before):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = functools.partial(torch.optim.lr_scheduler.StepLR, optimizer, 1, 0.5)
    scheduler = make() if before else None
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert optimizer.step.__func__  # a bound method: torch's schedulers ask for it
    scheduler = scheduler or make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # a first step that is skipped must count as taken
        for spoiled in (0 if level in ("O1", "O2") else None, None):
            train(model, optimizer, batches(1), spoiled)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_step_before_any_backward(level):
    model, optimizer = start(level)
    weights = copies(model.parameters())
    optimizer.zero_grad()
    optimizer.step()
    assert same(weights, model.parameters())
    train(model, optimizer, batches(1))
    assert not same(weights, model.parameters())


def test_closures_work_where_no_step_can_be_skipped():
    (batch,) = batches(1)
    for level, kwargs in (("O0", {}), ("O1", {"loss_scale": 128.0}), ("O4", {}), ("O5", {})):
        model, optimizer = start(level, lambda p: torch.optim.LBFGS(p, lr=0.1), **kwargs)

        def closure(model=model, optimizer=optimizer, level=level):
            optimizer.zero_grad()
            if level in ("O1", "O4"):
                assert torch.is_autocast_enabled("cpu")
            backward(model, optimizer, batch)
            return F.cross_entropy(model(batch[0]), batch[1])

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert losses[-1] < losses[0] * 0.9, level
        amp.reset()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_closures_are_refused_where_a_step_can_be_skipped(level):
    _, optimizer = start(level)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(closure=lambda: 1.0)


class WithCodeInIt(torch.optim.SGD):
    """A subclass: code of the program runs in its step."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD, WithCodeInIt])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_closure_that_raises_is_no_step(level, make):
    """As in plain torch, what it wrote stays: gradients, and weights."""
    model, optimizer = row(level, make)
    errors = [None, KeyError("a batch")]

    def closure():
        optimizer.zero_grad()
        block(model, optimizer)
        if error := errors.pop(0):
            with torch.no_grad():
                model.weight.fill_(-5.0)
            raise error

    optimizer.step(closure)
    with pytest.raises(KeyError, match="a batch"):
        optimizer.step(closure)
    assert amp.outcome(optimizer).numbers()[:3] == (True, 1, 0)
    assert optimizer._amp_stash.ledger.steps == 1
    assert value(model) == [-5.0, -5.0]
    optimizer.step()
    assert amp.outcome(optimizer).numbers()[:3] == (True, 2, 0)
    assert value(model) == [-6.0, -6.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_wrapper_may_go_on_after_its_closure_has_raised(level):
    class Forgiving(torch.optim.SGD):
        def step(self, closure):
            with contextlib.suppress(KeyError):
                closure()
            return super().step()

    model, optimizer = row(level, Forgiving)

    def closure():
        block(model, optimizer)
        raise KeyError

    optimizer.step(closure)
    assert amp.outcome(optimizer).numbers()[:3] == (True, 1, 0)
    assert value(model) == [-1.0, -1.0]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_groups_added_and_weights_unfrozen_later_are_trained(level):
    amp.reset()
    layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    for layer in layers:
        nn.init.constant_(layer.weight, 0.3)
    model = nn.ModuleList(layers)
    layers[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([*layers[0].parameters(), *layers[1].parameters()], lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    optimizer.add_param_group({"params": layers[2].parameters(), "lr": 0.25})
    layers[0].weight.requires_grad_(True)
    x = torch.ones(1, 2, dtype=layers[0].weight.dtype)
    scaled_backward(sum(layer(x).sum() for layer in layers), optimizer)
    optimizer.step()
    begun = torch.tensor(0.3)
    late = begun.to(layers[2].weight.dtype).float()  # its master begins with the rounded weight
    stored = {"O3": torch.float16}.get(level, torch.float32)
    expected = [begun.to(stored) - 0.5, begun.to(stored) - 0.5, late.to(stored) - 0.25]
    for weight, wanted in zip(model.state_dict().values(), expected, strict=True):
        assert torch.equal(weight, wanted.float().expand(2, 2))
    if level in MASTERED:
        assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}


def test_replaced_entries_get_masters():
    model, optimizer = start("O2")
    group = optimizer.param_groups[0]
    group["params"] = [p for p in model.parameters() if p.dim() > 1]
    before = copies(model.parameters())
    train(model, optimizer, batches(1))
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed == [p.dim() > 1 for p in model.parameters()]
    assert {p.dtype for p in group["params"]} == {torch.float32}


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_group_objects_stay_the_users_own(level):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = optimizer.param_groups
    group, params = groups[0], groups[0]["params"]
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer, batches(1))
    assert optimizer.param_groups is groups
    assert groups[0] is group
    assert group["params"] is params


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_copies_and_pickles_of_the_optimizer(level):
    model, optimizer = start(level)
    train(model, optimizer, batches(1))
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is torch.optim.SGD
        assert same(amp.master_params(twin), amp.master_params(optimizer))
        twin.step()


def test_optimizer_state_from_before_is_kept():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ((x, y),) = batches(1)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert same(moments, [optimizer.state[p]["exp_avg"] for p in amp.master_params(optimizer)])
    train(model, optimizer, batches(1))


def test_at_most_one_host_read_per_step(monkeypatch):
    """With SGD, which reads nothing itself, at O1 and O2, in a clean step, on a device."""
    monkeypatch.setattr(LossScaler, "_waits_for_nothing", False)
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "nonzero"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, name=name, original=original, **kwargs):
            reads.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spy)
    for level in ("O1", "O2"):
        model, optimizer = start(level)
        train(model, optimizer, batches(1))
        ((x, y),) = batches(1)
        loss = F.cross_entropy(model(x), y)
        reads.clear()
        scaled_backward(loss, optimizer)
        assert reads == [], level
        optimizer.step()
        assert reads == ["tolist"], level
        amp.reset()


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_what_programs_of_old_touch(level):
    model, optimizer = start(level)
    assert hasattr(optimizer, "_amp_stash")
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_lazy_init()
    stash = optimizer._amp_stash
    assert stash.lazy_init_called
    stash.lazy_init_called = True
    halves, masters = stash.all_fp16_params, stash.all_fp32_from_fp16_params
    assert len(halves) == len(masters) == (4 if level == "O2" else 0)
    assert all(m.dtype == torch.float32 for m in masters)
    assert len(stash.all_fp32_from_fp32_params) == 6 - len(masters)
    train(model, optimizer, batches(1))
    amp.reset()
    assert not hasattr(optimizer, "_amp_lazy_init")


@pytest.mark.parametrize("level", MASTERED)
def test_masters_that_come_back_to_their_group_are_trained(level):
    model, optimizer = row(level)
    group = optimizer.param_groups[0]
    listed = list(group["params"])
    for params in ([torch.nn.Parameter(torch.ones(1))], listed):
        group["params"][:] = params
        step(model, optimizer)
        assert (value(model) == [-1.0, -1.0]) == (params is listed)
        optimizer.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_parameter_shared_later_is_stepped_by_both(level):
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    first, second = [torch.optim.SGD([param], lr=1.0) for param in model.parameters()]
    amp.initialize(model, [first, second], opt_level=level, verbosity=0, loss_scale=8.0)
    second.add_param_group({"params": [model.weight]})
    block(model, [first, second])
    for number, optimizer in enumerate((first, second), 1):
        optimizer.step()
        assert value(model) == [-number, -number]


def test_a_weight_put_into_a_group_in_anothers_place_gets_a_master():
    model, optimizer = row("O2")
    other = torch.nn.Parameter(model.weight.detach().clone())
    model.weight, optimizer.param_groups[0]["params"][0] = other, other
    step(model, optimizer)
    assert optimizer.param_groups[0]["params"][0].dtype == torch.float32
    assert value(model) == [-1.0, -1.0]


def test_zero_grad_takes_its_argument_by_position():
    model, optimizer = row("O2")
    block(model, optimizer)
    optimizer.zero_grad(False)
    assert torch.equal(model.weight.grad, torch.zeros(1, 2).half())
