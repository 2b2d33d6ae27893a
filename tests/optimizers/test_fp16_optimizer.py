"""``FP16_Optimizer`` as BERT's programs of 2019 used it."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apex.contrib.optimizers
import apex.optimizers
from apex import fp16_utils
from apex.optimizers import FP16_Optimizer, FusedAdam
from apex.optimizers.fp16_optimizer import fused_norm
from tests import checkpoints

ADAMS = {"FusedAdam": FusedAdam, "FusedAdam of contrib": apex.contrib.optimizers.FusedAdam}


def start(adam=FusedAdam, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).half()
    decays = [p for name, p in model.named_parameters() if "bias" not in name]
    biases = [p for name, p in model.named_parameters() if "bias" in name]
    groups = [{"params": decays, "weight_decay": 0.01}, {"params": biases, "weight_decay": 0.0}]
    optimizer = adam(groups, lr=0.03, bias_correction=False, max_grad_norm=1.0)
    return model, FP16_Optimizer(optimizer, verbose=False, **options)


def loss_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 4, generator=generator).half()
    return F.mse_loss(model(x).float(), torch.ones(8, 2))


def train(model, optimizer, steps):
    """Two accumulated batches for each step, as in run_squad.py."""
    for step in steps:
        for batch in range(2):
            optimizer.backward(loss_of(model, 2 * step + batch) / 2)
        for group in optimizer.param_groups:
            group["lr"] = 0.03 * (1 - step / 100)
        optimizer.step()
        optimizer.zero_grad()


def test_one_class_under_all_its_names():
    assert apex.contrib.optimizers.FP16_Optimizer is FP16_Optimizer
    assert apex.contrib.optimizers.fp16_optimizer.FP16_Optimizer is FP16_Optimizer
    assert issubclass(FP16_Optimizer, fp16_utils.FP16_Optimizer)


@pytest.mark.parametrize("adam", ADAMS.values(), ids=ADAMS)
@pytest.mark.parametrize("options", [{"dynamic_loss_scale": True}, {"static_loss_scale": 128.0}])
def test_training(adam, options):
    """As the optimizer alone on float32 weights, with gradients that were added up in float16."""
    model, optimizer = start(adam, **options)
    twin, plain = start(adam)
    halves = [*twin.parameters()]
    plain = plain.optimizer  # its groups have float32 masters
    masters = [p for group in plain.param_groups for p in group["params"]]
    by_weight = [halves[0], halves[2], halves[1], halves[3]]  # in the order of the groups
    scale = optimizer.cur_scale
    for step in range(4):
        for half in halves:
            half.grad = None
        for batch in range(2):
            (loss_of(twin, 2 * step + batch) / 2 * scale).backward()
        for master, half in zip(masters, by_weight, strict=True):
            master.grad = half.grad.float() / scale
        for group in plain.param_groups:
            group["lr"] = 0.03 * (1 - step / 100)
        plain.step()
        with torch.no_grad():
            for master, half in zip(masters, by_weight, strict=True):
                half.copy_(master)
        train(model, optimizer, [step])
        checkpoints.assert_equal([*model.parameters()], halves)
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.cur_iter == 4
    assert loss_of(model) < loss_of(start()[0])


@pytest.mark.parametrize("dynamic", [True, False])
def test_an_overflow_skips_the_step_with_a_static_scale_too(dynamic):
    model, optimizer = start(dynamic_loss_scale=dynamic, static_loss_scale=64.0)
    before = copy.deepcopy(model.state_dict())
    optimizer.backward(loss_of(model) * math.inf)
    optimizer.step()
    checkpoints.assert_equal(model.state_dict(), before)
    assert optimizer.overflow
    assert optimizer.cur_scale == (2.0**15 if dynamic else 64.0)
    assert optimizer.cur_iter == 1
    optimizer.zero_grad()
    train(model, optimizer, [0])
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_defaults():
    _, optimizer = start(dynamic_loss_scale=True)
    scaler = optimizer.loss_scaler
    assert (scaler.cur_scale, scaler.scale_factor, scaler.scale_window) == (2.0**16, 2.0, 1000)
    assert (scaler.min_loss_scale, scaler.max_loss_scale) == (1.0, None)
    found = (optimizer.scale_factor, optimizer.scale_window, optimizer.last_overflow_iter)
    assert found == (2.0, 1000, -1)
    assert not hasattr(start(static_loss_scale=2.0)[1], "scale_factor")
    for name in ("scale_factor", "scale_window", "last_overflow_iter"):
        with pytest.raises(AttributeError):  # it would change nothing
            setattr(optimizer, name, 4)
    optimizer.cur_scale = 8
    assert optimizer.loss_scale == 8.0
    assert [len(group) for group in optimizer.fp32_groups] == [2, 2]
    assert {p.dtype for group in optimizer.fp32_groups for p in group} == {torch.float32}


@pytest.mark.parametrize("dynamic", [True, False])
def test_resume_is_bit_exact(tmp_path, dynamic):
    options = {"dynamic_loss_scale": dynamic, "static_loss_scale": 128.0}
    model, optimizer = start(**options)
    train(model, optimizer, range(3))
    file = tmp_path / "saved.pth"
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, range(3, 6))
    again, other = start(**options)
    train(again, other, [9])
    saved, state = torch.load(file)
    names = {"dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict", "fp32_groups"}
    assert names <= state.keys()
    again.load_state_dict(saved)
    other.load_state_dict(state)
    train(again, other, range(3, 6))
    ends = [[m.state_dict(), o.state_dict()] for m, o in ((again, other), (model, optimizer))]
    checkpoints.assert_equal(*ends)


def test_resume_grows_the_scale_when_the_first_run_does():
    """A second step after one backward counts in cur_iter and not in the scale's iterations."""
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 3}}
    model, optimizer = start(**options)
    train(model, optimizer, range(1))
    optimizer.backward(loss_of(model, 1) * math.inf)
    optimizer.step()
    optimizer.step()  # skipped as well
    optimizer.zero_grad()
    again, other = start(**options)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    scales = []
    for step in range(6):
        for m, o in ((model, optimizer), (again, other)):
            train(m, o, [step])
        scales.append([optimizer.cur_scale, other.cur_scale])
    assert all(one == resumed for one, resumed in scales)
    assert len({one for one, _ in scales}) == 3


def test_a_file_of_nvidias_apex_loads():
    """It has no bounds of the scale."""
    model, optimizer = start(dynamic_loss_scale=True)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    del state["min_loss_scale"], state["max_loss_scale"]
    state.update(cur_scale=4.0, cur_iter=7, last_overflow_iter=5, scale_window=3)
    _, other = start(dynamic_loss_scale=True)
    other.load_state_dict(state)
    scaler = other.loss_scaler
    assert (other.cur_scale, other.cur_iter, scaler.last_overflow_iter) == (4.0, 7, 5)
    assert (scaler.scale_window, scaler.min_loss_scale, scaler.max_loss_scale) == (3, 1.0, None)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="the saved masters have the shapes"):
        other.load_state_dict({**state, "fp32_groups": state["fp32_groups"][:1]})
    checkpoints.assert_equal(other.state_dict(), before)


def test_flat_masters_are_refused():
    _, optimizer = start()
    assert not hasattr(optimizer, "fp32_groups_flat")
    with pytest.raises(AttributeError, match="Use fp32_groups, a list of masters for each group"):
        optimizer.fp32_groups_flat[0].zero_()


def test_a_state_without_its_keys_changes_nothing():
    model, optimizer = start(dynamic_loss_scale=True)
    train(model, optimizer, range(2))
    good = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, [2])
    before = copy.deepcopy(optimizer.state_dict())
    keys = {"dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict", "fp32_groups"}
    for key in keys:
        with pytest.raises(ValueError, match=f"state_dict has no {key}; it has"):
            optimizer.load_state_dict({k: v for k, v in good.items() if k != key})
        checkpoints.assert_equal(optimizer.state_dict(), before)
    for key in ("state", "param_groups"):
        inner = {k: v for k, v in good["optimizer_state_dict"].items() if k != key}
        with pytest.raises(ValueError, match=f"state_dict has no {key}; it has"):
            optimizer.load_state_dict({**good, "optimizer_state_dict": inner})
        checkpoints.assert_equal(optimizer.state_dict(), before)
    with pytest.raises(ValueError, match="it has a NoneType"):
        optimizer.load_state_dict(None)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_count_that_is_no_integer_changes_nothing(dynamic):
    model, optimizer = start(dynamic_loss_scale=dynamic)
    train(model, optimizer, range(2))
    good = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, [2])
    before = copy.deepcopy(optimizer.state_dict())
    for wrong in (None, "three", math.inf, 1.5):
        with pytest.raises(ValueError, match=f"cur_iter was {wrong!r}; it must be an integer"):
            optimizer.load_state_dict({**good, "cur_iter": wrong})
        checkpoints.assert_equal(optimizer.state_dict(), before)


def test_fused_norm():
    x = torch.full((4, 4), 2.0**14, dtype=torch.float16)
    assert fused_norm(x) == 2.0**16
    assert fused_norm(x).dtype == torch.float32
