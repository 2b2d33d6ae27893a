"""FusedSGD: the formula, torch's own, first gradients, and what amp drives it by."""

import copy

import pytest
import torch

from apex.catalogue.tolerance import rms
from apex.optimizers import FusedSGD, fused_sgd
from tests.optimizers import common
from tests.optimizers.common import PATHS, give_grads, parameters, same, started, train, values
from tests.tolerance import assert_one_rounding

SMALL = ((7,), (33, 5))
OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.25},
    {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
]
AFTER = {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True}


@pytest.mark.parametrize("options", [*OPTIONS, AFTER], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_gives_the_bits_of_the_definition(options, dtype):
    results = []
    for path in ("reference", "triton"):
        params = parameters(dtype)
        results.append(train(FusedSGD(params, lr=0.05, **options), params, range(3), path))
    assert same(*results)


def original(weight, grads, lr, momentum, weight_decay=0.0, nesterov=False):
    """In float32, with the momentum as it is; the update is rounded before it is added."""
    kept = None
    for grad in grads:
        total = grad.float() + weight_decay * weight.float()
        buffer = total if kept is None else momentum * kept.float() + total
        kept = buffer.half()
        update = total + momentum * buffer if nesterov else buffer
        weight = weight + (-lr * update).half()
    return weight


@pytest.mark.parametrize("options", [{"momentum": 0.9}, OPTIONS[-1]], ids=str)
def test_float16_is_nearer_to_float64_than_torch_and_the_original(options):
    """Where the definition is computed; the kernel has its bits.

    1 % nearer than the original: 50,000 weights, of which other draws move that by 0.2 %.
    """
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(51, 50_000, generator=generator).half()

    def stepped(make, dtype):
        param = torch.nn.Parameter(start.to(dtype, copy=True))
        optimizer = make([param], lr=0.05, **options)
        for grad in grads:
            param.grad = grad.to(dtype)
            optimizer.step()
        return param.detach()

    exact = stepped(torch.optim.SGD, torch.float64)
    found = {
        "ours": stepped(FusedSGD, torch.float16),
        "torch": stepped(torch.optim.SGD, torch.float16),
        "original": original(start, grads, 0.05, **options),
    }
    distance = {name: rms(one.double() - exact) for name, one in found.items()}
    assert distance["ours"] < min(distance["torch"], distance["original"]), distance


# -- buffers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_parameter_that_comes_late_starts_its_own_history(path):
    """In the original the last parameter decides for all."""
    params, optimizer = started(FusedSGD, shapes=SMALL, lr=0.05, momentum=0.9, dampening=0.5)
    for number in range(3):
        give_grads(params, number)
        if number < 2:
            params[1].grad = None
        buffers = [optimizer.state[p].get("momentum_buffer", None) for p in params]
        before = [None if b is None else b.clone() for b in buffers]
        common.take_step(path, optimizer)
    first = optimizer.state[params[0]]["momentum_buffer"]
    exact = 0.9 * before[0].double() + 0.5 * params[0].grad.double()
    assert_one_rounding(first, exact)
    assert before[1] is None
    assert torch.equal(optimizer.state[params[1]]["momentum_buffer"], params[1].grad)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("storage", ["plain", "kahan"])
def test_no_buffers_without_momentum(storage, path):
    """As in torch; what a program keeps beside the weights is loaded all the same."""
    options = {"lr": 0.1, "dampening": 0.5, "storage": storage}
    params, optimizer = started(FusedSGD, torch.bfloat16, SMALL, steps=2, path=path, **options)
    assert not any("momentum_buffer" in optimizer.state[param] for param in params)
    for param in params:
        optimizer.state[param]["average"] = torch.ones_like(param)
    other = FusedSGD(params, **options)
    other.load_state_dict(optimizer.state_dict())
    assert all("average" in other.state[param] for param in params)
    optimizer.get_momentums(params)  # asked for by programs
    assert all("momentum_buffer" in optimizer.state[param] for param in params)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("between", ["nothing", "copy", "checkpoint"])
def test_momentum_switched_on_later(path, between):
    """It begins a history, as in torch."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedSGD([param], lr=0.1, dampening=0.5)
    plain_param = torch.nn.Parameter(torch.ones(3))
    plain = torch.optim.SGD([plain_param], lr=0.1, dampening=0.5, foreach=False)
    for number in range(4):
        for group in (optimizer.param_groups[0], plain.param_groups[0]):
            group["momentum"] = 0.9 if number else 0.0
        param.grad, plain_param.grad = torch.ones(3), torch.ones(3)
        common.take_step(path, optimizer)
        plain.step()
        if number < 2:
            exact = torch.tensor([0.9, 0.8][number]).double().expand(3)
            assert_one_rounding(param.detach(), exact)
        if number == 0 and between == "copy":
            optimizer = copy.deepcopy(optimizer)
            param = optimizer.param_groups[0]["params"][0]
        elif number == 0 and between == "checkpoint":
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = FusedSGD([param], lr=0.1, dampening=0.5)
            optimizer.load_state_dict(saved)
    assert_one_rounding(param.detach(), plain_param.detach().double())


@pytest.mark.parametrize("reloads", [False, True])
def test_a_first_gradient_of_zeros_begins_the_history(reloads):
    """As that of a weight behind one that starts at 0, or of an expert without an example."""
    param, twin = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizers = [
        FusedSGD([param], lr=0.1, momentum=0.9, dampening=0.5),
        torch.optim.SGD([twin], lr=0.1, momentum=0.9, dampening=0.5),
    ]
    for grad in (0.0, 1.0, 1.0):
        for optimizer, weight in zip(optimizers, (param, twin), strict=True):
            weight.grad = torch.full_like(weight, grad)
            optimizer.step()
        if reloads:
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert_one_rounding(param.detach(), twin.detach())


def test_get_momentums():
    params, optimizer = started(FusedSGD, shapes=SMALL, lr=0.1, momentum=0.9)
    momentums, first = optimizer.get_momentums(params[:1])
    assert first
    assert momentums[0] is optimizer.state[params[0]]["momentum_buffer"]
    assert not momentums[0].any()
    assert optimizer.get_momentums(params)[1] is False  # would drop the first one's history
    assert optimizer.get_momentums(params)[1] is False


def test_states_from_before_nesterov():
    optimizer = FusedSGD(parameters(), lr=0.1)
    state = optimizer.__getstate__()
    del state["param_groups"][0]["nesterov"]
    optimizer.__setstate__(state)
    assert optimizer.param_groups[0]["nesterov"] is False


def test_a_first_step_skipped_on_the_device_is_not_the_first():
    params, optimizer = started(FusedSGD, shapes=SMALL, lr=0.05, momentum=0.9, dampening=0.5)
    with pytest.MonkeyPatch.context() as patch:  # a CPU taken for a device that lags behind
        patch.setattr("apex.ops._runtime.waits", lambda device: True)
        give_grads(params, 0)
        before = values(params)
        optimizer.step_scaled(1.0, torch.tensor(1.0))
        assert same(before, values(params))
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.5)
        optimizer.load_state_dict(saved)
        give_grads(params, 1)
        optimizer.step_scaled(1.0, torch.tensor(0.0))
        assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], params[0].grad)
        first = params[0].grad.double()
        give_grads(params, 2)
        optimizer.step_scaled(1.0, torch.tensor(0.0))
    exact = 0.9 * first + 0.5 * params[0].grad.double()
    assert_one_rounding(optimizer.state[params[0]]["momentum_buffer"], exact)


def test_buffers_with_a_history_are_not_looked_at_again(monkeypatch):
    """1,000 tensors of 8 x 8 on a CPU: 1.9 ms a step; looked at in each step, 15."""
    looked_at = []
    is_new = fused_sgd._is_new
    monkeypatch.setattr(fused_sgd, "_is_new", lambda b: looked_at.append(b) or is_new(b))
    params = [*parameters(shapes=SMALL), *parameters(torch.bfloat16, shapes=SMALL)]
    optimizer = FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.5)
    train(optimizer, params, range(3), "reference")
    assert len(looked_at) == 4
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, params, range(3), "reference")
    assert len(looked_at) == 8
    copied = copy.deepcopy(optimizer)
    train(copied, copied.param_groups[0]["params"], range(3), "reference")
    assert len(looked_at) == 12


# -- for amp -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "scale", [128.0, 128, torch.tensor(128.0)], ids=["number", "int", "tensor"]
)
def test_most_recent_scale_divides_one_step(path, scale):
    expected = parameters()
    train(FusedSGD(expected, lr=0.05, momentum=0.9), expected, range(2), path or "reference")
    params, optimizer = started(FusedSGD, lr=0.05, momentum=0.9)
    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)
    optimizer.most_recent_scale = scale
    optimizer.scale_set_by_backward = True
    train(optimizer, params, range(1), path or "reference", scale=128.0)
    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)
    train(optimizer, params, range(1, 2), path or "reference")
    assert same(values(expected), values(params))


def test_attributes_of_the_original():
    optimizer = FusedSGD(parameters(), 0.1, 0.9, 0, 0.1, False, True, False, True)
    assert optimizer.wd_after_momentum is True
    assert optimizer.materialize_master_grads is False
    assert FusedSGD(parameters(), lr=0.1).materialize_master_grads is True


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "didn't specify a value of required optimization parameter lr"),
        ({"lr": 0.1, "momentum": -0.5}, "Invalid momentum value: -0.5"),
        ({"lr": 0.1, "weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        ({"lr": 0.1, "nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        (
            {"lr": 0.1, "nesterov": True, "momentum": 0.9, "dampening": 0.1},
            "Nesterov momentum requires a momentum and zero dampening",
        ),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        FusedSGD(parameters(), **options)


def test_lr_of_the_groups_is_enough():
    params = parameters(shapes=SMALL)
    groups = [{"params": [params[0]], "lr": 0.1}, {"params": [params[1]], "lr": 0.2}]
    train(FusedSGD(groups), params, range(1))
