"""What an initialised optimizer can still do."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp.scaler import LossScaler
from tests.amp.hand import batches, net, same

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def start(level, make=None, **kwargs):
    model = net()
    make = make or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    optimizer = make(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **kwargs)


def train(model, optimizer, count=1, seed=1, poison=None):
    for x, y in batches(count, seed):
        optimizer.zero_grad()
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
            if poison is not None:
                next(model.parameters()).grad.fill_(poison)
        optimizer.step()


@pytest.mark.parametrize("before", [True, False], ids=["scheduler first", "scheduler last"])
@pytest.mark.parametrize("level", LEVELS)
def test_schedulers_stay_silent(level, before):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert optimizer.step.__func__  # a bound method: torch's schedulers ask for it
    if not before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # a first step that is skipped must count as taken
        train(model, optimizer, poison=float("inf") if level in ("O1", "O2") else None)
        scheduler.step()
        train(model, optimizer)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("level", LEVELS)
def test_step_before_any_backward(level):
    model, optimizer = start(level)
    weights = [p.clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    assert same(weights, model.parameters())
    train(model, optimizer)


@pytest.mark.parametrize("set_to_none", [True, False, None])
@pytest.mark.parametrize("level", LEVELS)
def test_zero_grad(level, set_to_none):
    model, optimizer = start(level)
    ((x, y),) = batches(1)
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
    optimizer.zero_grad(**({} if set_to_none is None else {"set_to_none": set_to_none}))
    for p in [*model.parameters(), *amp.master_params(optimizer)]:
        if set_to_none is False:
            assert p.grad is None or not p.grad.any()
        else:
            assert p.grad is None
    # nothing of the first pass may be left in the second
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
    first = [p.grad.clone() for p in amp.master_params(optimizer)]
    optimizer.zero_grad()
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
        scaled.backward()
    assert same(first, [p.grad for p in amp.master_params(optimizer)])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_model_zero_grad_is_enough(level):
    runs = []
    for by_model in (False, True):
        model, optimizer = start(level)
        for x, y in batches(3):
            (model if by_model else optimizer).zero_grad()
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        runs.append([p.detach() for p in amp.master_params(optimizer)])
        amp.reset()
    assert same(*runs)


def test_closures_work_where_no_step_can_be_skipped():
    ((x, y),) = batches(1)
    for level, kwargs in (
        ("O0", {}),
        ("O1", {"loss_scale": 128.0}),
        ("O2", {"loss_scale": 128.0}),
        ("O4", {}),
        ("O5", {}),
    ):
        model, optimizer = start(level, lambda p: torch.optim.LBFGS(p, lr=0.1), **kwargs)

        def closure(model=model, optimizer=optimizer, level=level):
            optimizer.zero_grad()
            if level in ("O1", "O4"):
                assert torch.is_autocast_enabled("cpu")
            loss = F.cross_entropy(model(x), y)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            return loss

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


@pytest.mark.parametrize("level", LEVELS)
def test_groups_added_and_weights_unfrozen_later_are_trained(level):
    model = net()
    late = nn.Linear(5, 5)
    model.append(late)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([*model[:4].parameters(), *model[4].parameters()], lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer)
    optimizer.add_param_group({"params": late.parameters(), "lr": 0.01})
    model[0].weight.requires_grad_(True)
    watched = [model[0].weight, late.weight, late.bias]
    before = [p.clone() for p in watched]
    train(model, optimizer, 2)
    assert not any(map(torch.equal, before, watched))
    if level in ("O2", "O5"):
        assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    assert len(list(amp.master_params(optimizer))) == len(list(model.parameters()))


def test_replaced_entries_get_masters():
    model, optimizer = start("O2")
    group = optimizer.param_groups[0]
    group["params"] = [p for p in model.parameters() if p.dim() > 1]
    before = [p.clone() for p in model.parameters()]
    train(model, optimizer)
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed == [p.dim() > 1 for p in model.parameters()]
    assert {p.dtype for p in group["params"]} == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
def test_group_objects_stay_the_users_own(level):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups, group, params = (
        optimizer.param_groups,
        optimizer.param_groups[0],
        optimizer.param_groups[0]["params"],
    )
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer)
    assert optimizer.param_groups is groups
    assert groups[0] is group
    assert group["params"] is params


@pytest.mark.parametrize("level", LEVELS)
def test_copies_and_pickles_of_the_optimizer(level):
    model, optimizer = start(level)
    train(model, optimizer)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is torch.optim.SGD
        assert same(amp.master_params(twin), amp.master_params(optimizer))
        twin.step()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_plain_backward_and_step_go_through_the_masters(level):
    runs = []
    for use_amp in (True, False):
        model, optimizer = start(level, loss_scale=1.0)
        for x, y in batches(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if use_amp:
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            else:
                loss.backward()
            optimizer.step()
        runs.append([p.detach() for p in amp.master_params(optimizer)])
        amp.reset()
    assert same(*runs)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_follow_what_others_write_into_the_model(level):
    model, optimizer = start(level)
    train(model, optimizer)
    masters = list(amp.master_params(optimizer))
    exact = masters[0].clone()
    with torch.no_grad():
        model[0].weight[0] = 0.5  # an EMA swap, a broadcast, a late load
    optimizer.step()
    assert torch.equal(masters[0][0], torch.full_like(exact[0], 0.5))
    assert torch.equal(masters[0][1:], exact[1:])  # elsewhere not a bit is lost


def test_masters_start_from_unrounded_weights():
    model = net()
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert same(weights, amp.master_params(optimizer))


def test_optimizer_state_from_before_is_kept():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ((x, y),) = batches(1)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert same(moments, [optimizer.state[p]["exp_avg"] for p in amp.master_params(optimizer)])
    train(model, optimizer)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    train(model, optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_initialised_again_for_the_next_fold(level):
    model, optimizer = start(level)
    train(model, optimizer)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in weights.items())
    train(model, optimizer)
    assert len(model._forward_pre_hooks) == 1


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
        train(model, optimizer)
        ((x, y),) = batches(1)
        loss = F.cross_entropy(model(x), y)
        reads.clear()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        assert reads == [], level
        optimizer.step()
        assert reads == ["tolist"], level
        amp.reset()


@pytest.mark.parametrize("level", LEVELS)
def test_what_programs_of_old_touch(level):
    model, optimizer = start(level)
    assert hasattr(optimizer, "_amp_stash")
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_lazy_init()
    stash = optimizer._amp_stash
    assert stash.lazy_init_called
    stash.lazy_init_called = True
    halves, masters = stash.all_fp16_params, stash.all_fp32_from_fp16_params
    assert len(halves) == len(masters) == (4 if level in ("O2", "O5") else 0)
    assert all(m.dtype == torch.float32 for m in masters)
    assert len(stash.all_fp32_from_fp32_params) == 6 - len(masters)
    train(model, optimizer)
    amp.reset()
    assert not hasattr(optimizer, "_amp_lazy_init")


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_that_come_back_to_their_group_are_trained(level):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0
    )
    group = optimizer.param_groups[0]
    listed = list(group["params"])
    extra = torch.nn.Parameter(torch.ones(1))
    for params in ([extra], listed):
        group["params"][:] = params
        before = model.weight.detach().clone()
        with amp.scale_loss(model(torch.ones(2, 4)).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert torch.equal(model.weight, before) == (params is not listed)
        optimizer.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_parameter_shared_later_is_stepped_by_both(level):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    first = torch.optim.SGD([model.weight], lr=0.1)
    second = torch.optim.SGD([model.bias], lr=0.1)
    model, (first, second) = amp.initialize(
        model, [first, second], opt_level=level, verbosity=0, loss_scale=128.0
    )
    second.add_param_group({"params": [model.weight]})
    with amp.scale_loss(model(torch.ones(2, 4)).float().sum(), [first, second]) as scaled:
        scaled.backward()
    before = model.weight.detach().clone()
    for optimizer in (first, second):
        optimizer.step()
        assert not torch.equal(model.weight, before)
        before = model.weight.detach().clone()
