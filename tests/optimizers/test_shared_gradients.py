"""Gradients that share memory, such as one tensor for two weights, and inference tensors.

A step is that of copies of them. What an optimizer leaves in a gradient is not left there if it
would differ from weight to weight.
"""

import amp_C
import pytest
import torch

from apex import amp
from apex.ops.lists.clip import multiply_by_
from apex.ops.lists.overlaps import overlapping
from apex.ops.lists.unscale import unscale_, unscale_into
from apex.parallel import LARC
from tests.optimizers import common
from tests.optimizers.common import (
    EVERY,
    PATHS,
    in_two_groups,
    on,
    parameters,
    same,
    started,
    values,
)

SHAPE = (33, 5)
SIZE = 33 * 5
WRITERS = {
    "FusedLAMB": EVERY["FusedLAMB"],
    "LARC": lambda params: LARC(torch.optim.SGD(params, lr=0.1, weight_decay=0.1)),
}
KINDS = {
    **EVERY,
    "LARC": WRITERS["LARC"],
    "LARC around FusedSGD": lambda params: LARC(EVERY["FusedSGD"](params)),
}


def _tensor(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def one_tensor():
    gradient = _tensor(*SHAPE)
    return gradient, gradient, gradient


def views():
    gradient = _tensor(SIZE)
    return gradient.view(SHAPE), gradient.detach().view(SHAPE), gradient.view(SHAPE)


def parts():
    buffer = _tensor(SIZE + 80)
    return [buffer[start : start + SIZE].view(SHAPE) for start in (0, 40, 80)]


def inference():
    with torch.inference_mode():
        return [_tensor(*SHAPE) for _ in range(3)]


shared = pytest.mark.parametrize("shared", [one_tensor, views, parts])
shared_or_inference = pytest.mark.parametrize("shared", [one_tensor, views, parts, inference])
paths = pytest.mark.parametrize("path", PATHS)


def made(make, shared, *, copied):
    """Four weights, three of which share gradients, in two groups, and their optimizer."""
    params = parameters(shapes=[SHAPE, SHAPE, SHAPE, (7,)])
    for param, gradient in zip(params, [*shared(), _tensor(7)], strict=True):
        param.grad = gradient.clone() if copied else gradient
    return params, make(in_two_groups(params))


@paths
@shared_or_inference
@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_that_of_copies(name, shared, path):
    results = []
    for copied in (True, False):
        params, optimizer = made(KINDS[name], shared, copied=copied)
        with on(path):
            optimizer.step()
        results.append(values(params))
    assert same(*results)


@paths
@shared_or_inference
@pytest.mark.parametrize("name", WRITERS)
def test_only_gradients_of_their_own_are_written(name, shared, path):
    params, optimizer = made(WRITERS[name], shared, copied=False)
    given = [param.grad for param in params]
    before = [gradient.clone() for gradient in given]
    common.take_step(path, optimizer)
    assert all(param.grad is gradient for param, gradient in zip(params, given, strict=True))
    kept = [torch.equal(a, b) for a, b in zip(given, before, strict=True)]
    assert kept == [True, True, True, False]


@paths
@shared
@pytest.mark.parametrize("name", [name for name in EVERY if "contrib" not in name])
def test_shared_gradients_are_unscaled_once(name, shared, path):
    results = []
    for copied in (True, False):
        params, optimizer = made(EVERY[name], shared, copied=copied)
        with on(path):
            optimizer.step_scaled(0.5, write_grads=True)
        results.append((values(params), [param.grad for param in params]))
    assert same(results[0][0], results[1][0])
    if not optimizer._writes_grads:
        assert same(results[0][1], results[1][1])


# -- unscaling, clipping, and the functions of amp_C -----------------------------------------------

FLAG = torch.zeros(1, dtype=torch.int32)
EIGHTHS = {  # what divides gradients by 8 in place
    "unscale": lambda x: unscale_(x, 8.0),
    "check and unscale": lambda x: unscale_(x, torch.tensor(8.0)),
    "unscale_into": lambda x: unscale_into(x, x, 0.125, torch.zeros(1)),
    "clip": lambda x: multiply_by_(x, torch.tensor(0.125)),
    "scale": lambda x: amp_C.multi_tensor_scale(1, FLAG, [x, x], 0.125),
    "axpby": lambda x: amp_C.multi_tensor_axpby(1, FLAG, [x, x, x], 0.25, -0.125, -1),
    "l2norm_scale": lambda x: amp_C.multi_tensor_l2norm_scale(1, FLAG, [x, x], 0.125, False),
}


@paths
@pytest.mark.parametrize("shared", [one_tensor, views])
@pytest.mark.parametrize("name", EIGHTHS)
def test_each_is_multiplied_once(name, shared, path):
    gradients = [*shared(), _tensor(7)]
    expected = [gradient / 8 for gradient in gradients]
    with on(path):
        EIGHTHS[name](gradients)
    assert same(gradients, expected)


def test_amp_unscales_once(request):
    request.addfinalizer(amp.reset)  # or O1 would cast in later tests
    params, optimizer = started(torch.optim.SGD, shapes=[SHAPE] * 3, lr=0.1)
    amp.initialize(torch.nn.ParameterList(params), optimizer, opt_level="O1", loss_scale=128.0)
    with amp.scale_loss(torch.ones((), requires_grad=True), optimizer) as scaled:
        scaled.backward()
        for param, gradient in zip(params, one_tensor(), strict=True):
            param.grad = 128 * gradient
    assert all(torch.equal(param.grad, one_tensor()[0]) for param in params)


STEPS = {  # functions of amp_C that write into gradients, with their numbers
    "lamb": (4, [0.1, 0.9, 0.99, 1e-6, 1, 1, 0.1, 1, 1, 1.0, 0.5, False]),
    "lamb_mp": (4, [0.1, 0.9, 0.99, 1e-6, 1, 1, 0.1, 1, 1, 1.0, 0.5, False, FLAG, 0.5]),
    "adam_capturable": (4, [0.1, 0.9, 0.99, 1e-6, 1, 1, 1, 0.1, 0.5]),
    "adam_capturable_master": (5, [0.1, 0.9, 0.99, 1e-6, 1, 1, 1, 0.1, 0.5]),
}


@paths
@shared
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_amp_c_is_that_of_copies(name, shared, path):
    depth, numbers = STEPS[name]
    step, results = getattr(amp_C, f"multi_tensor_{name}"), []
    for copied in (True, False):
        given = shared()
        grads = [x.clone() for x in given] if copied else [*given]
        others = [[n + torch.ones(SHAPE) for _ in grads] for n in range(depth - 1)]
        with on(path):
            step(1, FLAG, [grads, *others], *numbers)
        results.append(sum(others, [*grads] * name.startswith("adam")))
    assert same(*results)


def test_what_overlaps():
    x = torch.zeros(24)
    cases = [
        ([x[:8], x[8:16], x[16:]], []),
        ([x[8:16], torch.zeros(3), x[:9], x[16:]], [0, 2]),
        ([x, x[2:3], x[20:], torch.zeros(3)], [0, 1, 2]),
        ([x.view(4, 6)[:, :3], x.view(4, 6)[:, 3:]], [0, 1]),  # between the elements of the other
        ([x.view(4, 6)[:, 1::2].t(), x[:1]], []),
        ([torch.zeros(0), torch.zeros(0), x], []),
    ]
    for tensors, positions in cases:
        assert overlapping(tensors) == positions
