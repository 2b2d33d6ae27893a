"""Every optimizer, each step against its formula in the catalogue, and against torch's own."""

import inspect
import itertools

import pytest
import torch

from apex.optimizers import FusedAdagrad, FusedAdam, FusedSGD
from tests.optimizers.common import (
    DTYPES,
    EVERY,
    MODES,
    PATHS,
    WAYS,
    check_steps,
    fuzz,
    in_two_groups,
    maker,
    parameters,
    same,
    started,
    train,
)
from tests.tolerance import TORCH_IN_FLOAT64, assert_close_to_largest, assert_one_rounding

SMALL = ((7,), (33, 5))
MORE = {"weight_decay": 0.0, "bias_correction": False, "grad_averaging": False, "init_zero": True}
MORE |= {"use_nvlamb": True, "max_grad_norm": 0.0}
FLAGS = [key for key, value in MORE.items() if isinstance(value, bool)]


def takes(name):
    """The numbers that are not in the catalogue's variants, and that the constructor has."""
    parameters = inspect.signature(WAYS[name][0].make).parameters
    return [key for key in MORE if key in parameters and parameters[key].default is not None]


CASES = [
    (name, dtype, {})
    for name, (_, variant) in WAYS.items()
    for dtype in DTYPES
    if dtype != torch.bfloat16 or "storage" not in variant.options  # low bits: test_auto_storage.py
]
CASES += [(name, torch.float32, {key: MORE[key]}) for name in WAYS for key in takes(name)]
CASES.append(("FusedLAMB", torch.float32, {"weight_decay": 0.0, "use_nvlamb": True}))
paths = pytest.mark.parametrize("path", PATHS)


@pytest.mark.filterwarnings("ignore:.*bfloat16 weights were lost")
@paths
@pytest.mark.parametrize(("name", "dtype", "options"), CASES, ids=str)
def test_formula(name, dtype, options, path):
    optimizer = maker(name)(in_two_groups(parameters(dtype)), **options)
    check_steps(optimizer, WAYS[name][0].formula, 2 if path == "triton" else 20, path)


@pytest.mark.exhaustive
@paths
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODES)
def test_formula_in_full(name, dtype, path):
    keys = [key for key in takes(name) if key in (*FLAGS, "weight_decay")]
    for chosen in itertools.product((True, False), repeat=len(keys)):
        more = {key: MORE[key] for key, is_set in zip(keys, chosen, strict=True) if is_set}
        optimizer = MODES[name](parameters(dtype), **more)
        check_steps(optimizer, WAYS[name][0].formula, 5 if path == "triton" else 20, path)


@paths
@pytest.mark.parametrize("name", EVERY)
def test_dtypes_mixed_in_one_optimizer(name, path):
    params = [param for dtype in DTYPES for param in parameters(dtype, SMALL)]
    check_steps(EVERY[name](params), WAYS[name][0].formula, 3, path)


FUZZED = [(name, torch.float16, "triton") for name in EVERY if name != "FusedMuon"]  # vectors
# a norm in float32 would show in float32 weights
FUZZED += [(n, torch.float32, "triton") for n, *_ in FUZZED if n != "FusedNovoGrad"]
FUZZED += [("FusedLAMB", torch.float32, path) for path in PATHS[:2]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "dtype", "path"), FUZZED)
def test_awkward_lists(name, dtype, path, seed):
    unclipped = {"max_grad_norm": 0.0} if name == "FusedLAMB" else {}  # inf would make all nan
    fuzz(lambda params: EVERY[name](params, **unclipped), seed, dtype, path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4, 40))
@paths
def test_more_awkward_lists(seed, path):
    fuzz(EVERY["FusedAdam"], seed, torch.float32, path)


# -- torch's optimizers ----------------------------------------------------------------------------

MOMENTUM = {"momentum": 0.9}
TORCHS = [  # ours, torch's, options of both, options of ours
    (FusedAdam, torch.optim.AdamW, {"weight_decay": 0.1}, {}),
    (FusedAdam, torch.optim.Adam, {"weight_decay": 0.1}, {"adam_w_mode": False}),
    (FusedAdagrad, torch.optim.Adagrad, {"weight_decay": 0.1}, {}),
    (FusedSGD, torch.optim.SGD, {}, {}),
    (FusedSGD, torch.optim.SGD, {"weight_decay": 0.1}, {}),
    (FusedSGD, torch.optim.SGD, MOMENTUM, {}),
    (FusedSGD, torch.optim.SGD, {**MOMENTUM, "weight_decay": 0.1, "dampening": 0.25}, {}),
    (FusedSGD, torch.optim.SGD, {**MOMENTUM, "weight_decay": 0.1, "nesterov": True}, {}),
]
torchs = pytest.mark.parametrize(("kind", "theirs", "both", "more"), TORCHS)


@torchs
def test_equals_torch(kind, theirs, both, more):
    """Bit for bit; torch's fused SGD may take dampening for the first gradient, too: not there."""
    left, right = parameters(), parameters()
    ours, fused = kind(left, lr=0.02, **both, **more), theirs(right, lr=0.02, fused=True, **both)
    begun = 1 if "dampening" in both else 0
    for param, value in zip(right, train(ours, left, range(begun)), strict=True):
        param.data.copy_(value)
    if begun:
        fused.load_state_dict(ours.torch_state_dict())
        fused.param_groups[0]["fused"] = True  # loading replaces a group's options
    steps = range(begun, 20)
    assert same(train(ours, left, steps), train(fused, right, steps))


@torchs
def test_definition_equals_torch_in_float64(kind, theirs, both, more):
    left, right = parameters(torch.float64), parameters(torch.float64)
    steps = range(20 if kind is FusedAdam else 3)
    ours = train(kind(left, lr=0.02, **both, **more), left, steps)
    plain = train(theirs(right, lr=0.02, foreach=False, **both), right, steps)
    for actual, exact in zip(ours, plain, strict=True):
        if kind is not FusedAdam:
            assert_one_rounding(actual, exact)
        elif exact.numel():  # torch decays before it updates
            assert_close_to_largest(actual, exact, TORCH_IN_FLOAT64)


@pytest.mark.parametrize(
    ("kind", "theirs", "both", "more", "start"),
    [(*case, {}) for case in TORCHS] + [(*TORCHS[2], {"initial_accumulator_value": 0.5})],
)
def test_switching_from_and_to_torch(kind, theirs, both, more, start):
    def torch_optimizer(params):
        return theirs(params, lr=0.02, fused=True, **both, **start)

    alone, params = parameters(), parameters()
    expected = train(torch_optimizer(alone), alone, range(15))
    first = torch_optimizer(params)
    train(first, params, range(5))
    second = kind(params, lr=0.02, **both, **more)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0].get("step", 5) == 5
    assert ("step" in second.param_groups[0]) == (kind is FusedAdam)
    train(second, params, range(5, 10))
    third = torch_optimizer(params)
    third.load_state_dict(second.torch_state_dict())
    third.param_groups[0]["fused"] = True  # loading replaces a group's options
    assert same(train(third, params, range(10, 15)), expected)


def test_what_cannot_be_converted():
    params, theirs = started(torch.optim.Adagrad, lr_decay=0.1)
    with pytest.raises(ValueError, match="saved with lr_decay"):
        FusedAdagrad(params).load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="no decoupled weight decay"):
        FusedAdagrad(params, weight_decay=0.1, adagrad_w_mode=True).torch_state_dict()
    after = {**MOMENTUM, "weight_decay": 0.1, "wd_after_momentum": True}
    with pytest.raises(ValueError, match="wd_after_momentum"):
        FusedSGD(params, lr=0.1, **after).torch_state_dict()


@pytest.mark.parametrize("name", [name for name in EVERY if name[5:] not in dir(torch.optim)])
def test_torch_has_none(name):
    with pytest.raises(NotImplementedError, match=f"torch.optim has no {name}"):
        EVERY[name](parameters()).torch_state_dict()
