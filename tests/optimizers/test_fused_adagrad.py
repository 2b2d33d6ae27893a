"""FusedAdagrad: the formula and torch's own."""

import pytest
import torch

from apex.optimizers import FusedAdagrad
from tests.optimizers.common import (
    DTYPES,
    PATHS,
    check_steps,
    fuzz,
    in_two_groups,
    parameters,
    same,
    train,
)
from tests.tolerance import assert_one_rounding

SMALL = ((7,), (33, 5))


def oracle(mode):
    def new(group, number, grad, param, state, norm):
        decay = group["weight_decay"]
        if not mode:
            grad = grad + decay * param
        h = state["sum"] + grad**2
        update = grad / (h.sqrt() + group["eps"])
        if mode:
            update = update + decay * param
        return param - group["lr"] * update, {"sum": h}

    return new


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("decay", "mode"), [(0.0, False), (0.1, False), (0.1, True)])
def test_formula(dtype, path, decay, mode):
    groups = in_two_groups(parameters(dtype))
    optimizer = FusedAdagrad(groups, 0.05, 1e-8, decay, adagrad_w_mode=mode)
    check_steps(optimizer, oracle(mode), 2 if path == "triton" else 20, path)


@pytest.mark.parametrize("path", PATHS)
def test_dtypes_mixed_in_one_optimizer(path):
    params = [param for dtype in DTYPES for param in parameters(dtype, SMALL)]
    check_steps(FusedAdagrad(params, weight_decay=0.1), oracle(False), 3, path)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_awkward_lists(seed, dtype):
    fuzz(lambda params: FusedAdagrad(params, weight_decay=0.1), seed, dtype, "triton")


# -- torch's optimizer -----------------------------------------------------------------------------


def test_equals_torch():
    ours, theirs = parameters(), parameters()
    left = train(FusedAdagrad(ours, weight_decay=0.1), ours, range(20))
    plain = torch.optim.Adagrad(theirs, weight_decay=0.1, fused=True)
    assert same(left, train(plain, theirs, range(20)))


def test_definition_equals_torch_in_float64():
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    left = train(FusedAdagrad(ours, weight_decay=0.1), ours, range(3))
    plain = torch.optim.Adagrad(theirs, weight_decay=0.1, foreach=False)
    for actual, exact in zip(left, train(plain, theirs, range(3)), strict=True):
        assert_one_rounding(actual, exact)


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_switching_from_and_to_torch(start):
    def torch_optimizer(params):
        return torch.optim.Adagrad(
            params, weight_decay=0.1, fused=True, initial_accumulator_value=start
        )

    alone, params = parameters(), parameters()
    expected = train(torch_optimizer(alone), alone, range(15))
    first = torch_optimizer(params)
    train(first, params, range(5))
    second = FusedAdagrad(params, weight_decay=0.1)
    second.load_state_dict(first.state_dict())
    train(second, params, range(5, 10))
    assert "step" not in second.param_groups[0]
    third = torch_optimizer(params)
    third.load_state_dict(second.torch_state_dict())
    third.param_groups[0]["fused"] = True  # loading replaces a group's options
    assert same(train(third, params, range(10, 15)), expected)


def test_what_cannot_be_converted():
    params = parameters()
    theirs = torch.optim.Adagrad(params, lr_decay=0.1)
    with pytest.raises(ValueError, match="saved with lr_decay"):
        FusedAdagrad(params).load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="no decoupled weight decay"):
        FusedAdagrad(params, weight_decay=0.1, adagrad_w_mode=True).torch_state_dict()


def test_layout_of_the_state():
    params = parameters(torch.float16, SMALL)
    optimizer = FusedAdagrad(params)
    train(optimizer, params, range(1))
    saved = optimizer.state_dict()
    assert {*saved["state"][0]} == {"sum"}
    assert saved["state"][0]["sum"].dtype == torch.float16
    assert {*saved["param_groups"][0]} == {"lr", "eps", "weight_decay", "params"}
