"""FusedSGD: the formula, torch's own, first gradients, and what amp drives it by."""

import copy

import pytest
import torch

from apex.optimizers import FusedSGD
from tests.optimizers.common import (
    DTYPES,
    PATHS,
    check_steps,
    fuzz,
    give_grads,
    in_two_groups,
    on,
    parameters,
    same,
    train,
    values,
)
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


def oracle(after=False):
    def new(group, number, grad, param, state, norm):
        momentum, decay = group["momentum"], group["weight_decay"]
        if not after:
            grad = grad + decay * param
        slots = {}
        if momentum:
            buffer = momentum * state["momentum_buffer"] + (1 - group["dampening"]) * grad
            buffer = grad if number == 1 else buffer
            slots["momentum_buffer"] = buffer
            grad = grad + momentum * buffer if group["nesterov"] else buffer
        if after:
            grad = grad + decay * param
        return param - group["lr"] * grad, slots

    return new


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, options) for options in (*OPTIONS, AFTER)]
    + [(dtype, OPTIONS[3]) for dtype in DTYPES if dtype != torch.float32],
    ids=str,
)
def test_formula(dtype, path, options):
    optimizer = FusedSGD(in_two_groups(parameters(dtype)), lr=0.05, **options)
    after = "wd_after_momentum" in options
    check_steps(optimizer, oracle(after), 2 if path == "triton" else 20, path)


@pytest.mark.parametrize("path", PATHS)
def test_dtypes_mixed_in_one_optimizer(path):
    """The original skips bfloat16 and float64 without a word."""
    params = [param for dtype in DTYPES for param in parameters(dtype, SMALL)]
    check_steps(FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.5), oracle(), 3, path)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_awkward_lists(seed, dtype):
    def make(params):
        return FusedSGD(params, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True)

    fuzz(make, seed, dtype, "triton")


@pytest.mark.parametrize("options", [*OPTIONS, AFTER], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_gives_the_bits_of_the_definition(options, dtype):
    results = []
    for path in ("reference", "triton"):
        params = parameters(dtype)
        results.append(train(FusedSGD(params, lr=0.05, **options), params, range(3), path))
    assert same(*results)


# -- torch's optimizer -----------------------------------------------------------------------------


def from_first_on(options):
    """Whether torch's fused kernel computes it: it takes dampening for the first gradient too."""
    return not options.get("dampening")


@pytest.mark.parametrize("options", list(filter(from_first_on, OPTIONS)), ids=str)
def test_equals_torch(options):
    ours, theirs = parameters(), parameters()
    left = train(FusedSGD(ours, lr=0.05, **options), ours, range(20))
    right = train(torch.optim.SGD(theirs, lr=0.05, fused=True, **options), theirs, range(20))
    assert same(left, right)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_definition_equals_torch_in_float64(options):
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    left = train(FusedSGD(ours, lr=0.05, **options), ours, range(3))
    right = train(torch.optim.SGD(theirs, lr=0.05, foreach=False, **options), theirs, range(3))
    for actual, exact in zip(left, right, strict=True):
        assert_one_rounding(actual, exact)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_switching_from_and_to_torch(options):
    def torch_optimizer(params):
        return torch.optim.SGD(params, lr=0.05, fused=True, **options)

    alone, params = parameters(), parameters()
    expected = train(torch_optimizer(alone), alone, range(15))
    first = torch_optimizer(params)
    train(first, params, range(5))
    second = FusedSGD(params, lr=0.05, **options)
    second.load_state_dict(first.state_dict())
    train(second, params, range(5, 10))
    third = torch_optimizer(params)
    third.load_state_dict(second.torch_state_dict())
    third.param_groups[0]["fused"] = True  # loading replaces a group's options
    assert same(train(third, params, range(10, 15)), expected)
    assert "step" not in second.param_groups[0]


def test_what_torch_cannot_do_is_not_handed_over():
    with pytest.raises(ValueError, match="wd_after_momentum"):
        FusedSGD(parameters(), lr=0.1, **AFTER).torch_state_dict()


# -- buffers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_parameter_that_comes_late_starts_its_own_history(path):
    """In the original the last parameter decides for all."""
    params = parameters(shapes=SMALL)
    optimizer = FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.5)
    for number in range(3):
        give_grads(params, number)
        if number < 2:
            params[1].grad = None
        buffers = [optimizer.state[p].get("momentum_buffer", None) for p in params]
        before = [None if b is None else b.clone() for b in buffers]
        with on(path):
            optimizer.step()
    first = optimizer.state[params[0]]["momentum_buffer"]
    exact = 0.9 * before[0].double() + 0.5 * params[0].grad.double()
    assert_one_rounding(first, exact)
    assert before[1] is None
    assert torch.equal(optimizer.state[params[1]]["momentum_buffer"], params[1].grad)


def test_layout_of_the_state():
    params = parameters(torch.float16, SMALL)
    optimizer = FusedSGD(params, lr=0.1, momentum=0.5)
    train(optimizer, params, range(1))
    saved = optimizer.state_dict()
    assert {*saved["state"][0]} == {"momentum_buffer"}
    assert saved["state"][0]["momentum_buffer"].dtype == torch.float16
    keys = {"lr", "momentum", "dampening", "weight_decay", "nesterov", "params"}
    assert {*saved["param_groups"][0]} == keys


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("storage", ["plain", "kahan"])
def test_no_buffers_without_momentum(storage, path):
    """As in torch; what a program keeps beside the weights is loaded all the same."""
    params = parameters(torch.bfloat16, SMALL)
    optimizer = FusedSGD(params, lr=0.1, dampening=0.5, storage=storage)
    train(optimizer, params, range(2), path)
    assert not any("momentum_buffer" in optimizer.state[param] for param in params)
    for param in params:
        optimizer.state[param]["average"] = torch.ones_like(param)
    other = FusedSGD(params, lr=0.1, dampening=0.5, storage=storage)
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
        with on(path):
            optimizer.step()
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
    params = parameters(shapes=SMALL)
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9)
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
    params = parameters(shapes=SMALL)
    optimizer = FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.5)
    lagging = {"waits": lambda device: True}  # a CPU taken for a device that lags behind
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("apex.ops._runtime.waits", lagging["waits"])
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


# -- for amp -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scale", [128.0, torch.tensor(128.0)], ids=["number", "tensor"])
def test_most_recent_scale_divides_one_step(path, scale):
    expected = parameters()
    train(FusedSGD(expected, lr=0.05, momentum=0.9), expected, range(2), path or "reference")
    params = parameters()
    optimizer = FusedSGD(params, lr=0.05, momentum=0.9)
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
