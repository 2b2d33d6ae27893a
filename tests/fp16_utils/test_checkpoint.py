"""Checkpoints of ``FP16_Optimizer``: resumed bit for bit, and those of NVIDIA's Apex."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex.amp.scaler import LossScaler as AmpLossScaler
from apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, LossScaler
from apex.optimizers import FusedAdam
from tests import checkpoints


def start(make=torch.optim.Adam, scale_window=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model[0].half()
    model[2].half()
    options = {"dynamic_loss_scale": True, **options}
    if options["dynamic_loss_scale"]:
        options["dynamic_loss_args"] = {"init_scale": 2.0**10, "scale_window": scale_window}
    return model, FP16_Optimizer(make(model.parameters(), lr=0.125), verbose=False, **options)


def train(model, optimizer, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 4, generator=generator)
        hidden = model[1](model[0](x.half()).float())
        optimizer.zero_grad()
        optimizer.backward(F.mse_loss(model[2](hidden.half()).float(), torch.ones(8, 2)))
        optimizer.step()


def state_of(model, optimizer):
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()])


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("make", [torch.optim.Adam, FusedAdam])
@pytest.mark.parametrize("dynamic", [True, False])
def test_resume_is_bit_exact(tmp_path, make, dynamic, model_first):
    model, optimizer = start(make, dynamic_loss_scale=dynamic)
    train(model, optimizer, range(5))
    file = tmp_path / "saved.pth"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(5, 9))
    again, other = start(make, dynamic_loss_scale=dynamic)
    train(again, other, [20, 21])  # what is loaded replaces everything
    saved = torch.load(file)  # weights_only, torch's default
    loads = [
        lambda: again.load_state_dict(saved["model"]),
        lambda: other.load_state_dict(saved["optimizer"]),
    ]
    for load in loads if model_first else reversed(loads):
        load()
    train(again, other, range(5, 9))
    checkpoints.assert_equal(state_of(again, other), state_of(model, optimizer))


def test_the_state_is_plain_data_and_not_shared():
    model, optimizer = start()
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    assert type(state["loss_scaler"]) is dict
    state.pop("optimizer_state_dict")  # torch's optimizers share what they load
    before = copy.deepcopy(state)
    pairs = [start(), start()]
    for _, other in pairs:
        other.load_state_dict({**state, "optimizer_state_dict": other.optimizer.state_dict()})
    train(*pairs[0], range(2, 9))
    checkpoints.assert_equal(state, before)
    assert pairs[0][1].loss_scale == 2.0**13
    assert pairs[1][1].loss_scale == 2.0**10


def as_saved(kind, **values):
    """An object as NVIDIA's Apex saved it: a class of its time with the attributes of its time."""
    made = kind.__new__(kind)
    made.__dict__.update(values)
    return made


OLD = {
    "2018, dynamic": as_saved(
        DynamicLossScaler,
        cur_scale=4096.0,
        cur_iter=11,
        last_overflow_iter=9,
        scale_factor=2.0,
        scale_window=3,
    ),
    "2018, static": as_saved(LossScaler, cur_scale=128.0),
    "2025, dynamic": as_saved(
        AmpLossScaler,
        _loss_scale=4096.0,
        _unskipped=1,
        _scale_seq_len=3,
        _max_loss_scale=2.0**24,
        _min_loss_scale=None,
        _has_overflow=False,
        _overflow_buf=torch.zeros(1, dtype=torch.int32),
        dynamic=True,
    ),
    "2025, static": as_saved(
        AmpLossScaler, _loss_scale=128.0, _unskipped=5, _scale_seq_len=2000, dynamic=False
    ),
}


@pytest.mark.parametrize("kind", OLD)
def test_old_files_load(tmp_path, kind):
    model, optimizer = start()
    train(model, optimizer, range(2))
    state = {**optimizer.state_dict(), "loss_scaler": OLD[kind]}
    file = tmp_path / "saved.pth"
    torch.save(state, file)
    _, other = start()
    other.load_state_dict(torch.load(file))
    masters = other.all_fp32_from_fp16_params
    checkpoints.assert_equal(masters, optimizer.all_fp32_from_fp16_params)
    dynamic = kind.endswith("dynamic")
    assert other.loss_scale == (4096.0 if dynamic else 128.0)
    assert other.dynamic_loss_scale == dynamic
    if dynamic:  # one clean iteration since the last change, and the window is three
        scales = []
        for _ in range(5):
            other.loss_scaler.update_scale(False)
            scales.append(other.loss_scale)
        assert scales == [4096.0, 8192.0, 8192.0, 8192.0, 16384.0]


def without(name):
    """The newest of the dynamic scalers in OLD, damaged."""
    values = {key: value for key, value in vars(OLD["2025, dynamic"]).items() if key != name}
    return as_saved(AmpLossScaler, **values)


def with_scaler(state, **numbers):
    return {"loss_scaler": {**state["loss_scaler"], **numbers}}


def test_errors_change_nothing():
    model, optimizer = start()
    train(model, optimizer, range(3))
    good = copy.deepcopy(optimizer.state_dict())
    fewer = [good["fp32_from_fp16"][0][:-1]]
    shape = [[*good["fp32_from_fp16"][0][:-1], torch.zeros(7)]]
    bad = [
        ({"loss_scaler": model}, TypeError, "the saved loss_scaler is a Sequential"),
        ({"loss_scaler": {"cur_iter": 3}}, ValueError, "has no 'cur_scale'"),
        ({"loss_scaler": {"cur_scale": -1.0}}, ValueError, "must be a number from"),
        ({"loss_scaler": {"_loss_scale": 2.0}}, ValueError, "has no 'dynamic'; it has _loss_scale"),
        ({"loss_scaler": without("_unskipped")}, ValueError, "has no '_unskipped'; it has _loss_s"),
        ({"loss_scaler": without("_scale_seq_len")}, ValueError, "has no '_scale_seq_len'; it has"),
        (with_scaler(good, cur_iter=None), ValueError, "saved cur_iter was None; it must be an in"),
        (with_scaler(good, last_overflow_iter=0.5), ValueError, "last_overflow_iter was 0.5; it"),
        ({"fp32_from_fp16": fewer}, ValueError, "the saved masters have the shapes"),
        ({"fp32_from_fp16": shape}, ValueError, r"\(7,\)"),
        ({"optimizer_state_dict": {"state": {}, "param_groups": []}}, ValueError, "param"),
        ({"optimizer_state_dict": {"state": {}}}, ValueError, "state_dict has no param_groups"),
    ]
    model, optimizer = start()
    train(model, optimizer, [7])
    before = state_of(model, optimizer)
    for change, error, text in bad:
        with pytest.raises(error, match=text):
            optimizer.load_state_dict({**good, **change})
        checkpoints.assert_equal(state_of(model, optimizer), before)
    for key in good.keys() - {"dynamic_loss_scale"}:  # the scaler's class tells it
        with pytest.raises(ValueError, match=f"state_dict has no {key}; it has"):
            optimizer.load_state_dict({k: v for k, v in good.items() if k != key})
        checkpoints.assert_equal(state_of(model, optimizer), before)
    with pytest.raises(ValueError, match="it has a NoneType"):
        optimizer.load_state_dict(None)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_order_of_2018_is_refused(frozen):
    """Then the masters of a group came first, and frozen parameters were left out."""
    model, optimizer = start()
    if frozen:
        model[0].weight.requires_grad_(False)
        inner = torch.optim.Adam(model.parameters(), lr=0.125)
        optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    train(model, optimizer, range(2))
    before = state_of(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    inner = state["optimizer_state_dict"]
    order = [1, 4, 5, 2, 3] if frozen else [0, 1, 4, 5, 2, 3]  # 2 and 3 are float32
    state["optimizer_state_dict"] = {
        "state": {key: inner["state"][was] for key, was in enumerate(order)},
        "param_groups": [{**inner["param_groups"][0], "params": [*range(len(order))]}],
    }
    with pytest.raises(ValueError, match="before July 2018"):
        optimizer.load_state_dict(state)
    checkpoints.assert_equal(state_of(model, optimizer), before)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.SGD])
def test_state_of_other_shapes_or_none_loads(make):
    """Adafactor's state of a matrix is a row and a column."""
    model, optimizer = start(make)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.state.clear()
    optimizer.load_state_dict(state)
    checkpoints.assert_equal(optimizer.state_dict(), state)
