"""FusedNovoGrad: the formula, and its norms through late parameters, skips and checkpoints."""

import copy

import pytest
import torch

from apex.ops.lists.tensor_lists import as_vector
from apex.optimizers import FusedNovoGrad
from tests.optimizers import common
from tests.optimizers.common import DTYPES, PATHS, give_grads, on, parameters, same, started, train
from tests.tolerance import THREE_STEPS, assert_close_to_largest, assert_one_rounding, each

SMALL = ((7,), (33, 5))


def blended(group, grads, start):
    """The norm after these gradients, in float64."""
    beta, norm = group["betas"][1], start
    for grad in grads:
        if group["norm_type"] == 0:
            now = grad.double().abs().max()
            norm = now if norm is None else norm
            norm = beta * norm + (1 - beta) * now
        else:
            now = grad.double().norm()
            norm = now if norm is None else norm
            norm = (beta * norm**2 + (1 - beta) * now**2).sqrt()
    return norm


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dtype", "norm_type", "init_zero"),
    [
        *((torch.float32, kind, zero) for kind in (0, 2) for zero in (False, True)),
        *((dtype, 2, False) for dtype in DTYPES if dtype != torch.float32),
    ],
)
def test_norms(path, norm_type, init_zero, dtype):
    params, optimizer = started(
        FusedNovoGrad, dtype, SMALL, norm_type=norm_type, init_zero=init_zero, betas=(0.9, 0.5)
    )
    grads = [[], []]
    for number in range(3):
        give_grads(params, number)
        for seen, param in zip(grads, params, strict=True):
            seen.append(param.grad.clone())
        common.take_step(path, optimizer)
    group = optimizer.param_groups[0]
    for seen, param in zip(grads, params, strict=True):
        exact = blended(group, seen, torch.tensor(0.0).double() if init_zero else None)
        assert_one_rounding(optimizer.state[param]["norm"], exact)


# -- the norms in the group ----------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_moment_of_inf_stays_inf(path):
    """On a CPU torch's foreach_lerp would make nan of it."""
    (param,) = params = parameters(torch.float32, ((7,),))
    optimizer = FusedNovoGrad(params, lr=0.02)
    for moment in (0.0, torch.inf):
        param.grad = torch.ones_like(param)
        common.take_step(path, optimizer)
        optimizer.state[param]["exp_avg"].fill_(moment)
    param.grad = torch.ones_like(param)
    common.take_step(path, optimizer)
    assert (optimizer.state[param]["exp_avg"] == torch.inf).all()
    assert (param == -torch.inf).all()


@pytest.mark.parametrize("path", PATHS)
def test_parameters_that_come_late_or_pause(path):
    """Each keeps its own norm, whichever of them have gradients; the original gives up."""
    params, optimizer = started(FusedNovoGrad, shapes=((3,), (4,), (5,)), betas=(0.9, 0.5))
    seen = [[], [], []]
    for number, present in enumerate([(1,), (0, 1), (2,), (0, 2), (0, 1, 2)]):
        give_grads(params, number)
        for index, param in enumerate(params):
            if index in present:
                seen[index].append(param.grad.clone())
            else:
                param.grad = None
        common.take_step(path, optimizer)
    group = optimizer.param_groups[0]
    for grads, param in zip(seen, params, strict=True):
        exact = blended(group, grads, None)
        assert_one_rounding(optimizer.state[param]["norm"], exact)


def test_a_state_from_before_the_first_step():
    """There the original raises KeyError."""
    params, others = parameters(), parameters()
    optimizer, resumed = FusedNovoGrad(params, lr=0.02), FusedNovoGrad(others, lr=0.02)
    resumed.load_state_dict(optimizer.state_dict())
    assert same(train(resumed, others, range(3)), train(optimizer, params, range(3)))


def test_a_torn_state_is_refused():
    params, optimizer = started(FusedNovoGrad, steps=1)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1]
    with pytest.raises(ValueError, match="has 6 norms"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_converted_model_is_stepped_on(loaded):
    """Norms are by dtype, and go where the parameters went."""
    expected, params = parameters(shapes=SMALL), parameters(shapes=SMALL)
    plain, optimizer = FusedNovoGrad(expected), FusedNovoGrad(params)
    train(plain, expected, range(2))
    train(optimizer, params, range(2))
    for param in params:
        param.data, param.grad = param.data.double(), None
    if loaded:
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = FusedNovoGrad(params)
        optimizer.load_state_dict(saved)
    train(plain, expected, range(2, 4), "reference")
    train(optimizer, params, range(2, 4), "reference")
    each(assert_close_to_largest, params, expected, THREE_STEPS)
    sizes = [norms.numel() for norms in optimizer.state_dict()["param_groups"][0]["exp_avg_sq"]]
    assert sizes == [0, 0, 0, 2]


def test_a_parameter_taken_out_by_hand():
    """The others keep their norms, as in a group without it."""
    results = []
    for late in (True, False):
        params = parameters(shapes=(*SMALL, *SMALL))
        optimizer = FusedNovoGrad(params if late else params[1:])
        train(optimizer, params, range(1))
        if late:
            del optimizer.param_groups[0]["params"][0]
        results.append(train(optimizer, params, range(1, 3))[1:])
    assert same(*results)


def test_a_part_of_a_model_is_converted():
    """Each parameter keeps its norm; a new optimizer cannot tell whose those of two dtypes are."""
    params = parameters(shapes=SMALL) + parameters(torch.float64, SMALL)
    optimizer = FusedNovoGrad(params)
    train(optimizer, params, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    for param in params[:1]:
        param.data, param.grad = param.data.double(), None
    norms = [optimizer.state[param]["norm"].clone() for param in params]
    train(optimizer, params, range(1, 2))
    sizes = [x.numel() for x in optimizer.state_dict()["param_groups"][0]["exp_avg_sq"]]
    assert sizes == [0, 1, 0, 3]
    assert all(0.5 < optimizer.state[p]["norm"] / n < 2 for p, n in zip(params, norms, strict=True))
    with pytest.raises(ValueError, match="has 2 norms .*float32 .* a model of the same dtypes"):
        FusedNovoGrad(params).load_state_dict(saved)


def test_a_first_step_skipped_on_the_device_leaves_no_norm():
    expected, params = parameters(shapes=SMALL), parameters(shapes=SMALL)
    plain = FusedNovoGrad(expected, lr=0.02)
    train(plain, expected, range(2), "reference")
    optimizer = FusedNovoGrad(params, lr=0.02)
    with pytest.MonkeyPatch.context() as patch, on("reference"):
        patch.setattr("apex.ops._runtime.waits", lambda device: True)
        give_grads(params, 5)
        params[0].grad[0] = float("inf")
        optimizer.step_scaled(1.0, torch.tensor(1.0))
        for number in range(2):
            give_grads(params, number)
            optimizer.step_scaled(1.0, torch.tensor(0.0))
    assert optimizer.param_groups[0]["step"].tolist() == [2]
    common.assert_rounded(params, expected)


def test_a_cleared_state_is_saved():
    params, others = parameters(), parameters()
    optimizer = FusedNovoGrad(params, lr=0.02)
    train(optimizer, params, range(1))
    optimizer.state.clear()
    saved = optimizer.state_dict()
    assert "exp_avg_sq" not in saved["param_groups"][0]
    FusedNovoGrad(others).load_state_dict(saved)


def test_norms_in_the_groups_alone():
    """Those of a subclass with a step of its own are saved and copied as they are."""
    params = parameters() + parameters(torch.float64, SMALL)
    optimizer = FusedNovoGrad(params, lr=0.02)
    train(optimizer, params, range(2))
    vectors = optimizer.param_groups[0]["exp_avg_sq"]
    kept = [optimizer.state[param].pop("norm") for param in params]
    assert same(torch.cat(vectors).unbind(), kept)
    assert optimizer.state_dict()["param_groups"][0]["exp_avg_sq"] is vectors
    assert same(copy.deepcopy(optimizer).param_groups[0]["exp_avg_sq"], vectors)


@pytest.mark.parametrize("path", PATHS)
def test_norms_in_one_vector_step_as_others(path):
    """A step reads and writes the vector, whether parameters are new, pause, or were loaded."""
    results = []
    for apart in (False, True):
        params = parameters(shapes=(*SMALL, *SMALL)) + parameters(torch.float64, SMALL)
        optimizer = FusedNovoGrad(params, lr=0.02)
        for number, pausing in enumerate([(), (), (1,), (0, 3), ()]):
            give_grads(params, number)
            for index in pausing:
                params[index].grad = None
            common.take_step(path, optimizer)
            if number == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = FusedNovoGrad(params)
                optimizer.load_state_dict(saved)
            for state in optimizer.state.values() if apart else ():
                state["norm"] = state["norm"].clone()
        norms = [optimizer.state[param]["norm"] for param in params]
        assert [as_vector(x).data_ptr() == x[0].data_ptr() for x in (norms[:4], norms[4:])] == (
            [not apart] * 2
        )
        assert same(torch.cat(optimizer.param_groups[0]["exp_avg_sq"]).unbind(), norms)
        results.append([*norms, *params])
    assert same(*results)


def test_arguments_of_the_original():
    modes = [FusedNovoGrad(parameters(), reg_inside_moment=x).moment_mode for x in (True, False)]
    assert modes == [0, 1]
    with pytest.raises(RuntimeError, match="only support l2/inf norm now: norm_type was 1"):
        FusedNovoGrad(parameters(), norm_type=1)
