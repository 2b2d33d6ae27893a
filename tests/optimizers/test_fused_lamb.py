"""FusedLAMB: the formula, trust ratios, clipping, what is left in gradients, layouts of state."""

import functools
import math

import pytest
import torch

from apex.catalogue.optimizers import Step, adam, lamb
from apex.ops.updates import cpu_fused
from apex.optimizers import FusedLAMB
from tests.optimizers import common
from tests.optimizers.common import (
    DTYPES,
    PATHS,
    assert_right,
    check_steps,
    give_grads,
    on,
    parameters,
    same,
    started,
    stepped_on_expanded_gradients,
    train,
    values,
)
from tests.tolerance import CLIPPED, assert_close_to_largest, each

SMALL = ((7,), (33, 5))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", [True, False])
def test_clipping_looks_at_unscaled_gradients(path, mode):
    """One scale among dtypes and groups: the norm is that of all gradients, times the factor."""
    groups = [{"params": parameters(dtype, SMALL, seed)} for seed, dtype in enumerate(DTYPES)]
    groups[1]["weight_decay"] = 0.0
    optimizer = FusedLAMB(groups, lr=0.02, adam_w_mode=mode)
    check_steps(optimizer, lamb, 2 if path == "triton" else 5, path, factor=0.125)
    check_steps(
        FusedLAMB(parameters(shapes=SMALL), lr=0.02, max_grad_norm=1.0), lamb, 1, path, factor=1e-3
    )


@pytest.mark.parametrize("path", PATHS)
def test_no_clipping_at_zero(path):
    """There the original divides by 0: gradients vanish and only the decay acts."""
    expected, params = parameters(shapes=SMALL), parameters(shapes=SMALL)
    train(FusedLAMB(expected, max_grad_norm=1e9), expected, range(2), path)
    assert same(
        train(FusedLAMB(params, max_grad_norm=0.0), params, range(2), path), values(expected)
    )


def test_a_group_cannot_change_the_clipping():
    """As in the original, which reads the constructor's."""
    expected, params = parameters(shapes=SMALL), parameters(shapes=SMALL)
    optimizer = FusedLAMB([{"params": params, "max_grad_norm": 1e9}])
    plain = FusedLAMB(expected)
    assert same(train(optimizer, params, range(2)), train(plain, expected, range(2)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("zero", ["param", "grad"])
def test_no_ratio_without_a_norm(path, zero):
    params, optimizer = started(
        FusedLAMB, shapes=SMALL, lr=0.5, weight_decay=0.1, max_grad_norm=0.0, eps=1e-12
    )
    give_grads(params, 0)
    (params[0].data if zero == "param" else params[0].grad).zero_()
    before = params[0].detach().clone()
    common.take_step(path, optimizer)
    assert params[0].isfinite().all()
    if zero == "param":  # the first step of Adam: all of size lr
        assert_close_to_largest(params[0].detach().abs(), torch.full((7,), 0.5), CLIPPED)
    else:  # the term is the decay alone, and the ratio takes its size out
        assert_close_to_largest(params[0].detach(), before * 0.5, CLIPPED)


@pytest.mark.parametrize("path", PATHS)
def test_large_tensors(path):
    """Beyond a row and a piece of the CPU's path, and a chunk of the kernel's."""
    size = cpu_fused.PIECE + 77 if path is None else 9000
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator))
        for shape in ((5,), (size,), (3, 3), (size // 3, 2), (0,))
    ]
    check_steps(FusedLAMB(params, lr=0.02), lamb, 1, path)
    check_steps(FusedLAMB(params, lr=0.02, max_grad_norm=0.0), lamb, 1, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"adam_w_mode": False}, {"grad_averaging": False, "max_grad_norm": 0.0}],
    ids=str,
)
def test_gradients_hold_the_term(dtype, options, path):
    """What is multiplied by learning rate and ratio: Adam's update."""
    params, optimizer = started(FusedLAMB, dtype, lr=0.02, **options)
    give_grads(params, 0)
    numbers = {**optimizer._arguments(), **optimizer.param_groups[0]}
    clip = 1 / max(1, math.hypot(*[p.grad.double().norm() for p in params]))
    clip = clip if numbers["max_grad_norm"] else 1.0
    steps = [
        Step(1, numbers, clip * p.grad.double(), p.detach().double().clone(), {}) for p in params
    ]
    common.take_step(path, optimizer)
    exact = [(step.param - adam(step)[0]) / 0.02 for step in steps]
    pairs = [("grad", param.grad, term) for param, term in zip(params, exact, strict=True)]
    assert_right(pairs, path, norms=True, clips=clip < 1)


@pytest.mark.parametrize("path", PATHS)
def test_expanded_gradients_are_left_alone(path):
    """Their elements share memory, so nothing can be written there."""
    common.assert_rounded(*stepped_on_expanded_gradients(FusedLAMB, path))


@pytest.mark.parametrize("path", PATHS)
def test_gradients_behind_masters_are_left_alone(path):
    """amp's own bookkeeping would notice."""
    params = parameters(shapes=SMALL)
    grads = {param: torch.ones_like(param, dtype=torch.float16) for param in params}
    copies = {param: param.detach().half() for param in params}
    with on(path):
        FusedLAMB(params, lr=0.1).step_scaled(0.5, grads=grads, copies=copies)
    for param in params:
        assert grads[param].eq(1).all()
        assert torch.equal(copies[param], param.detach().half())


# -- numbers on a device, storage, state -----------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_tensors_as_numbers(path, decay):
    expected, params = parameters(shapes=SMALL), parameters(shapes=SMALL)
    plain = FusedLAMB(expected, lr=0.25, weight_decay=decay)
    optimizer = FusedLAMB(params, lr=torch.tensor(0.25), weight_decay=torch.tensor([decay]))
    train(plain, expected, range(2), path)
    common.assert_rounded(train(optimizer, params, range(2), path), expected)


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("storage", ["kahan", "stochastic"])
def test_storage(path, storage):
    params = parameters(torch.bfloat16, SMALL)
    masters = common.widened(params)
    optimizer = FusedLAMB(params, lr=0.02, storage=storage)
    plain = FusedLAMB(masters, lr=0.02)
    for number in range(3):
        common.give_both(params, masters, number)
        common.take_step(path, optimizer, plain)
    each(assert_close_to_largest, params, masters, 2.0**-6)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_moments(dtype, kept):
    """As the original keeps them; bfloat16, which it refuses, in float32."""
    params, optimizer = started(FusedLAMB, dtype, SMALL, steps=2)
    other = FusedLAMB(parameters(dtype, SMALL))
    other.load_state_dict(optimizer.state_dict())
    for one in (optimizer, other):
        assert {x.dtype for state in one.state.values() for x in state.values()} == {kept}


@pytest.mark.filterwarnings("ignore:.*bfloat16 weights were lost")
def test_second_moments_of_bfloat16_forget():
    """In eight bits a change by a thousandth is rounded away, and old gradients would stay."""
    param = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = FusedLAMB([param], max_grad_norm=0.0)
    for size in [1.0] + [1e-3] * 50:
        param.grad = torch.full_like(param, size)
        optimizer.step()
    assert optimizer.state[param]["exp_avg_sq"].max() < 0.96e-3


# -- under amp -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_amp_can_leave_the_scale_to_the_step(level):
    """Clipping sees unscaled gradients either way."""
    found = []
    for options in ({}, {"fused_step": True}):
        make = functools.partial(FusedLAMB, lr=0.02, max_grad_norm=0.05)
        _, masters, _ = common.trained_under_amp(make, level, loss_scale=1024.0, **options)
        found.append(masters)
    each(assert_close_to_largest, found[1], found[0], CLIPPED)
