"""FusedMixedPrecisionLamb: masters, numbers on the device, mixed dtypes, GradScaler, state."""

import copy
import pickle

import pytest
import torch

from apex.optimizers import FusedLAMB, FusedMixedPrecisionLamb
from tests.optimizers import common
from tests.optimizers.common import PATHS, give_both, parameters, same, started, train, values
from tests.tolerance import CLIPPED, assert_close_to_largest, each

SMALL = ((7,), (33, 5))
HALVES = (torch.float16, torch.bfloat16)


def pair(dtype, **options):
    """16-bit parameters with masters, and float32 twins of these."""
    params = parameters(dtype, SMALL)
    wide = common.widened(params)
    mixed = FusedMixedPrecisionLamb(params, lr=0.02, reduced_precision_dtype=dtype, **options)
    return params, mixed, wide, FusedLAMB(wide, lr=0.02, **options)


def masters_of(optimizer, params):
    return [optimizer.state[param]["master_param"] for param in params]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("options", [{}, {"use_nvlamb": True, "adam_w_mode": False}], ids=str)
def test_steps_like_float32(dtype, path, options):
    params, mixed, wide, plain = pair(dtype, **options)
    for number in range(2 if path == "triton" else 5):
        give_both(params, wide, number)
        common.take_step(path, mixed, plain)
    for param, other in zip(params, wide, strict=True):
        master = mixed.state[param]["master_param"]
        assert_close_to_largest(master, other.detach(), CLIPPED)
        nearest = torch.equal(param.detach(), master.to(dtype))
        assert nearest or (path == "triton" and dtype == torch.bfloat16)  # the interpreter's store
        assert mixed.state[param]["exp_avg"].dtype == torch.float32


def test_masters_are_made_at_the_first_step():
    """So that a broadcast of the weights after the constructor counts."""
    params, mixed, wide, plain = pair(torch.float16)
    assert mixed.param_groups_full_precision[0]["params"][0] is params[0]
    with torch.no_grad():
        for param, other in zip(params, wide, strict=True):
            param.fill_(0.5)
            other.fill_(0.5)
    give_both(params, wide, 0)
    common.take_step(None, mixed, plain)
    found = mixed.param_groups_full_precision[0]["params"]
    assert [x.dtype for x in found] == [torch.float32] * 2
    each(assert_close_to_largest, found, values(wide), CLIPPED)


def test_groups_keep_their_own_numbers():
    """The original overwrites them with the defaults."""
    first, second = parameters(shapes=SMALL)
    optimizer = FusedMixedPrecisionLamb(
        [{"params": [first], "lr": 0.5, "step": 3}, {"params": [second]}], lr=0.25, step=7
    )
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]
    assert [int(group["step"]) for group in optimizer.param_groups] == [3, 7]
    for group in optimizer.param_groups:
        assert (group["lr"].dtype, group["lr"].shape) == (torch.float32, ())
        assert (group["step"].dtype, group["step"].shape) == (torch.int32, (1,))
    train(optimizer, [first, second], range(2))
    assert [int(group["step"]) for group in optimizer.param_groups] == [5, 9]


def test_a_group_that_is_no_dict():
    with pytest.raises(TypeError, match="param_group must be a dict"):
        FusedMixedPrecisionLamb(parameters()).add_param_group(parameters())


@pytest.mark.parametrize("path", PATHS)
def test_dtypes_mixed_among_and_in_groups(path):
    """The original measures a wrong norm, or fails where a group has another dtype."""
    dtypes = (torch.float16, torch.float32, torch.bfloat16)
    params = [param for dtype in dtypes for param in parameters(dtype, SMALL)]
    wide = common.widened(params)
    mixed = FusedMixedPrecisionLamb(
        [{"params": params[:3]}, {"params": params[3:]}],
        lr=0.02,
        reduced_precision_dtype=torch.float16,
    )
    plain = FusedLAMB(wide, lr=0.02)
    give_both(params, wide, 0)
    common.take_step(path, mixed, plain)
    for param, exact in zip(params, values(wide), strict=True):
        actual = mixed.state[param].get("master_param", param.detach())
        relative = 2.0**-7 if param.dtype == torch.bfloat16 else CLIPPED
        assert_close_to_largest(actual, exact, relative)
        assert ("master_param" in mixed.state[param]) == (param.dtype == torch.float16)


@pytest.mark.parametrize("historic", [False, True])
def test_grad_scaler(historic):
    params, mixed, wide, plain = pair(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number in range(3):
        scaler.scale(torch.ones(()))
        give_both(params, wide, number, scale=scaler.get_scale())
        if number == 1:
            params[0].grad[2] = float("inf")
        if historic:
            mixed.step(grad_scaler=scaler)
        else:
            scaler.step(mixed)
        scaler.update()
        if number != 1:
            plain.step()
    assert scaler.get_scale() == 128.0
    assert int(mixed.param_groups[0]["step"]) == 2
    each(assert_close_to_largest, masters_of(mixed, params), wide, CLIPPED)


@pytest.mark.parametrize("path", PATHS)
def test_moments_keep_the_dtype_they_were_saved_in(path):
    params, optimizer = started(FusedMixedPrecisionLamb, torch.float16, SMALL, steps=1)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float16
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].float()
    optimizer.load_state_dict(saved)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32
    train(optimizer, params, range(1, 2), path)
    assert all(param.isfinite().all() for param in params)


@pytest.mark.parametrize("written_after", [False, True])
def test_masters_that_were_not_saved_are_made(written_after):
    """From the weights of the next step: a model may be loaded after its optimizer."""
    params, mixed, wide, plain = pair(torch.bfloat16)
    give_both(params, wide, 0)
    common.take_step(None, mixed, plain)
    saved = copy.deepcopy(mixed.state_dict())
    for state in saved["state"].values():
        del state["master_param"]
    mixed.load_state_dict(saved)
    with torch.no_grad():
        for param, other in zip(params, wide, strict=True):
            if written_after:
                param.mul_(0.5)
            other.copy_(param)
    give_both(params, wide, 1)
    common.take_step(None, mixed, plain)
    each(assert_close_to_largest, masters_of(mixed, params), wide, CLIPPED)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_keep_what_the_constructor_was_told(duplicate):
    params = parameters(torch.bfloat16, SMALL)
    mixed = FusedMixedPrecisionLamb(params, step=7, reduced_precision_dtype=torch.bfloat16)
    copied = duplicate(mixed)
    assert copied.reduced_precision_dtype == torch.bfloat16
    others = copied.param_groups[0]["params"]
    assert same(train(mixed, params, range(2)), train(copied, others, range(2)))
    assert "master_param" in copied.state[others[0]]
    copied.add_param_group({"params": parameters(torch.bfloat16, SMALL)})
    assert int(copied.param_groups[1]["step"]) == 7
