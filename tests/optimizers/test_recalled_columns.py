"""What a step keeps of its columns is never stale: edits between steps, beside one that forgets."""

import pytest
import torch

from apex.ops import _runtime
from apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

SHAPES = ((4, 4), (5,), (2, 3))
SLOTS = {FusedSGD: "momentum_buffer"}
KINDS = {
    "FusedAdam": (FusedAdam, {}),
    "FusedSGD": (FusedSGD, {"lr": 0.1, "momentum": 0.9}),
    "FusedLAMB": (FusedLAMB, {}),
    "FusedNovoGrad": (FusedNovoGrad, {}),
}


def _slot(optimizer):
    return SLOTS.get(type(optimizer), "exp_avg")


def elsewhere(optimizer, params):
    """Weights and states move, and stay the same objects."""
    params[0].data = params[0].data.clone()
    state = optimizer.state[params[1]][_slot(optimizer)]
    state.data = state.data.clone()


def turned(optimizer, params):
    """A square weight is turned where it lies: address and shape are as before."""
    params[0].data = params[0].data.t()


def another_state(optimizer, params):
    name = _slot(optimizer)
    optimizer.state[params[2]][name] = torch.full_like(params[2], 0.25)


def states_in_another_order(optimizer, params):
    optimizer.state[params[0]] = optimizer.state.pop(params[0])


def no_state(optimizer, params):
    del optimizer.state[params[1]][_slot(optimizer)]


def no_gradient(optimizer, params):
    params[1].grad = None


def wider_gradients(optimizer, params):
    params[1].grad = torch.stack([params[1].grad, params[1].grad], dim=1)[:, 0]  # with gaps


def groups_in_two(optimizer, params):
    optimizer.param_groups[0]["params"] = [*params[:2]]
    optimizer.add_param_group({"params": [params[2]], "lr": 0.5})


def another_dtype(optimizer, params):
    params[2].data = params[2].data.double()
    params[2].grad = params[2].grad.double()
    del optimizer.state[params[2]]


EDITS = (
    elsewhere, turned, another_state, states_in_another_order, no_state, no_gradient,
    wider_gradients, groups_in_two, another_dtype,
)  # fmt: skip


def _trained(kind, options, edit, forgets):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = kind(params, **options)
    recalled = 0
    for number in range(6):
        for param in params:
            grad = torch.randn(param.shape, generator=generator)
            param.grad = grad.to(param.dtype)
        if number == 3:
            edit(optimizer, params)
        if forgets:
            optimizer._uniform = None
        with _runtime.use("triton"):
            optimizer.step()
        recalled += bool(optimizer._uniform and optimizer._uniform.together)
    return [*params, *(x for s in optimizer.state.values() for x in s.values())], recalled


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
def test_after_an_edit_a_step_is_that_of_one_that_forgets(kind, options, edit):
    found, recalled = _trained(kind, options, edit, False)
    expected, never = _trained(kind, options, edit, True)
    assert recalled >= 2
    assert never == 0
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_nested_gradient_is_refused_in_words():
    """torch would end the process where it compares sizes of one."""
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = FusedSGD([param], lr=0.1)
    for _ in range(3):
        param.grad = torch.ones(2, 2)
        with _runtime.use("triton"):
            optimizer.step()
    assert optimizer._uniform.together
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(2)])
    with _runtime.use("triton"), pytest.raises((TypeError, RuntimeError)):
        optimizer.step_scaled(grads={param: nested})


def test_nothing_kept_is_in_a_copy():
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = FusedSGD([param], lr=0.1)
    param.grad = torch.ones(2, 2)
    with _runtime.use("triton"):
        optimizer.step()
    assert "_uniform" in vars(optimizer)
    assert "_uniform" not in optimizer.__getstate__()
