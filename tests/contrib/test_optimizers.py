"""apex.contrib.optimizers: the formulas and the calls of 2019."""

import copy

import pytest
import torch

from apex.catalogue.optimizers import adam_eps_inside
from apex.contrib.optimizers import FusedAdam, FusedLAMB, fused_adam, fused_lamb
from apex.contrib.optimizers.fused_sgd import FusedSGD
from apex.optimizers import FusedAdam as NewAdam
from apex.optimizers import FusedLAMB as NewLAMB
from apex.optimizers import FusedSGD as NewSGD
from tests.optimizers import common
from tests.optimizers.common import (
    DTYPES,
    PATHS,
    check_steps,
    give_grads,
    on,
    parameters,
    same,
    started,
    train,
    values,
)
from tests.tolerance import CLIPPED, assert_close_to_largest, each

SMALL = ((7,), (33, 5))
every = pytest.mark.parametrize("make", common.OLD.values(), ids=common.OLD.keys())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "bias_correction": False}], ids=str)
def test_formula_with_eps_beside_the_root(path, dtype, options):
    """That below the root is in the catalogue."""
    optimizer = FusedAdam(parameters(dtype), lr=0.02, eps=1e-3, **options)
    check_steps(optimizer, adam_eps_inside, 2 if path == "triton" else 20, path)


@every
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["list", "generator", "groups"])
def test_gradients_outputs_and_scale_as_arguments(make, path, kind):
    """As FP16_Optimizer calls it: float32 weights, 16-bit gradients, 16-bit outputs."""
    params, twins = parameters(shapes=SMALL), parameters(shapes=SMALL)
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = make(groups if kind == "groups" else params)
    plain = make(twins)
    outputs = [torch.zeros_like(param, dtype=torch.float16) for param in params]
    for number in range(2):
        give_grads(twins, number)
        for twin in twins:
            twin.grad = twin.grad.half().float()
        scaled = [twin.grad.half() * 128 for twin in twins]
        shapes = {
            "list": scaled,
            "generator": (grad for grad in scaled),
            "groups": [scaled[:1], scaled[1:]],
        }
        given = [outputs[:1], outputs[1:]] if kind == "groups" else outputs
        with on(path):
            optimizer.step(grads=shapes[kind], output_params=given, scale=128.0)
            plain.step()
    common.assert_rounded(params, twins)
    assert same(outputs, [param.detach().half() for param in params])


@every
def test_some_gradients_are_the_parameters_own(make):
    params, twins = parameters(shapes=SMALL), parameters(shapes=SMALL)
    optimizer, plain = make(params), make(twins)
    give_grads(params, 0)
    give_grads(twins, 0)
    given, params[0].grad = params[0].grad, None
    optimizer.step(None, [given, None])
    plain.step()
    assert same(values(params), values(twins))


@every
@pytest.mark.parametrize("scale", [4.0, torch.tensor(4.0)])
def test_scale_alone(make, scale):
    params, twins = parameters(shapes=SMALL), parameters(shapes=SMALL)
    optimizer, plain = make(params), make(twins)
    give_grads(params, 0, scale=4.0)
    give_grads(twins, 0)
    optimizer.step(scale=scale)
    plain.step()
    common.assert_rounded(params, twins)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("norms", ["given", "tensors", "measured"])
def test_clipping_by_group(path, norms):
    """The norm is that of the scaled gradients; without one the original fails."""
    params, twins = parameters(shapes=SMALL), parameters(shapes=SMALL)
    groups = [{"params": params[:1], "max_grad_norm": 0.5}, {"params": params[1:]}]
    optimizer, plain = FusedAdam(groups, eps=1e-2), FusedAdam(twins, eps=1e-2)
    give_grads(params, 0, scale=8.0)
    give_grads(twins, 0)
    over = (twins[0].grad.norm() + 1e-6) / 0.5
    twins[0].grad /= over
    given = {
        "given": [param.grad.norm().item() for param in params],
        "tensors": [param.grad.norm() for param in params],
        "measured": None,
    }
    with on(path):
        optimizer.step(scale=8.0, grad_norms=given[norms])
        plain.step()
    each(assert_close_to_largest, params, twins, CLIPPED)


def test_steps_are_counted_for_each_parameter():
    """A parameter that comes late gets the corrections of its own first step."""
    params, twins = parameters(shapes=SMALL), parameters(shapes=SMALL)
    optimizer = FusedAdam(params, lr=0.02)
    for number in range(3):
        give_grads(params, number)
        if number < 2:
            params[1].grad = None
        optimizer.step()
    assert [optimizer.state[param]["step"] for param in params] == [3, 1]
    assert "step" not in optimizer.param_groups[0]
    late = FusedAdam(twins[1:], lr=0.02)
    give_grads(twins, 2)
    late.step()
    assert torch.equal(params[1].detach(), twins[1].detach())
    saved = copy.deepcopy(optimizer.state_dict())
    others = [torch.nn.Parameter(value) for value in values(params)]
    resumed = FusedAdam(others, lr=0.02)
    resumed.load_state_dict(saved)
    assert same(train(resumed, others, range(2)), train(optimizer, params, range(2)))


def test_a_flag_that_is_not_read(monkeypatch):
    from apex.ops import _runtime

    params, twins = parameters(shapes=SMALL), parameters(shapes=SMALL)
    optimizer, plain = FusedAdam(params, lr=0.02), FusedAdam(twins, lr=0.02)
    for number, flag in enumerate((0.0, 1.0, 0.0)):
        give_grads(params, number)
        optimizer.found_inf = torch.tensor(flag)
        with monkeypatch.context() as patch, on("reference"):
            patch.setattr(_runtime, "waits", lambda device: True)
            optimizer.step()
        if not flag:
            give_grads(twins, number)
            plain.step()
    del optimizer.found_inf
    common.assert_rounded(params, twins)
    assert [int(optimizer.state[param]["step"]) for param in params] == [2, 2]
    resumed = FusedAdam(params, lr=0.02)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.state[params[0]]["step"] == 2


@every
def test_hooks_run_once(make):
    """A step is one, whichever way it is called, and after the new classes were used."""
    train(NewSGD(parameters(), lr=0.1), [], range(1))
    params, optimizer = started(make, shapes=SMALL)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    train(optimizer, params, range(1))
    give_grads(params, 0)
    assert optimizer.step(lambda: 3.0, scale=2.0) == 3.0
    assert seen == [1, 1]


@every
@pytest.mark.parametrize("argument", ["grads", "output_params"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_lists_that_do_not_fit(make, argument):
    params, optimizer = started(make, shapes=SMALL)
    give_grads(params, 0)
    before = values(params)
    with pytest.raises(ValueError, match=rf"{argument} contained \[1\] tensors by group.*\[2\]"):
        optimizer.step(**{argument: [params[0].grad]})
    with pytest.raises(ValueError, match="grad_norms contained 3 norms, and there are 1 groups"):
        optimizer.step(grad_norms=[1.0, 2.0, 3.0])
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(TypeError, match=f"{argument}: tensor 1 is a nested tensor"):
        optimizer.step(**{argument: [params[0].grad, nested]})
    assert same(before, values(params))


@pytest.mark.parametrize(("inside", "mode"), [(True, 0), (False, 1)])
def test_where_eps_is(inside, mode):
    """The formulas go by the attribute, the update by the mode, as in the original."""
    optimizer = FusedAdam(parameters(), eps_inside_sqrt=inside)
    assert (optimizer.eps_inside_sqrt, optimizer.eps_mode) == (inside, mode)


def test_what_has_no_effect_or_is_refused():
    params, twins = parameters(shapes=SMALL), parameters(shapes=SMALL)
    many, plain = FusedAdam(params, use_mt=True), FusedAdam(twins)
    assert same(train(many, params, range(2)), train(plain, twins, range(2)))
    with pytest.raises(RuntimeError, match="AMSGrad"):
        FusedAdam(params, amsgrad=True)
    with pytest.raises(ValueError, match="Invalid max_grad_norm value: -1.0"):
        FusedAdam(params, max_grad_norm=-1.0)


def test_lamb_is_the_new_one():
    params, twins = parameters(shapes=SMALL), parameters(shapes=SMALL)
    old = FusedLAMB(params, 0.02, False, (0.8, 0.9), 1e-4, 0.1, False, False, False, True, 0.5)
    numbers = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}
    flags = dict.fromkeys(("bias_correction", "adam_w_mode", "grad_averaging"), False)
    new = NewLAMB(twins, max_grad_norm=0.5, **numbers, **flags)
    assert same(train(old, params, range(3)), train(new, twins, range(3)))


def test_sgd_is_the_new_one():
    params, twins = parameters(shapes=SMALL), parameters(shapes=SMALL)
    old = FusedSGD(params, 0.1, 0.9, 0.0, 0.1, True, True)
    new = NewSGD(twins, 0.1, 0.9, 0.0, 0.1, True, True)
    assert same(train(old, params, range(3)), train(new, twins, range(3)))
    buffers, fresh = old.get_momentums(params)
    assert not fresh
    assert buffers[0] is old.state[params[0]]["momentum_buffer"]
    with pytest.raises(ValueError, match="lr"):
        FusedSGD(params)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [*common.OLD.values(), lambda p: FusedLAMB(p, lr=0.02)])
def test_under_amp(level, make):
    common.trained_under_amp(make, level)


def test_the_names():
    assert fused_adam.FusedAdam is FusedAdam
    assert fused_lamb.FusedLAMB is FusedLAMB


def test_the_new_adams_count_of_steps_goes_on():
    params, new = started(NewAdam, shapes=[(3,)], steps=3)
    old = FusedAdam(params)
    old.load_state_dict(new.state_dict())
    assert old.state[params[0]]["step"] == 3
