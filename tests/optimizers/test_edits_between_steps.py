"""What is kept between steps is never stale: edits, beside an optimizer that forgets all of it.

Kept are facts about lists by their metadata, tables of addresses, and which gradients are apart.
"""

import numpy as np
import pytest
import torch

from apex.ops import _runtime
from apex.ops.lists import metadata, pointer_tables
from apex.optimizers import FusedAdam, FusedSGD
from tests.optimizers import common
from tests.optimizers.common import EVERY

SHAPES = ((4, 4), (5,), (2, 3))
# Not Muon, which makes two groups of a group with matrices and others.
KINDS = {name: make for name, make in EVERY.items() if name != "FusedMuon"}


def elsewhere(optimizer, params):
    """Weights and states move, and stay the same objects."""
    params[0].data = params[0].data.clone()
    state = optimizer.state[params[1]][optimizer.slots[0]]
    state.data = state.data.clone()


def turned(optimizer, params):
    """A square weight is turned where it lies: address and shape are as before."""
    params[0].data = params[0].data.t()


def another_state(optimizer, params):
    optimizer.state[params[2]][optimizer.slots[0]] = torch.full_like(params[2], 0.25)


def states_in_another_order(optimizer, params):
    optimizer.state[params[0]] = optimizer.state.pop(params[0])


def no_state(optimizer, params):
    del optimizer.state[params[1]][optimizer.slots[0]]


def a_master(optimizer, params):
    """The weight becomes what it is the rounded value of."""
    optimizer.state[params[1]]["master_param"] = torch.full_like(params[1], 0.5)


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


def smaller(optimizer, params):
    """A weight with its state and gradient is cut off where it lies."""
    params[1].data = params[1].data[:3]
    params[1].grad = params[1].grad[:3]
    state = optimizer.state[params[1]]
    state[optimizer.slots[0]].data = state[optimizer.slots[0]].data[:3]
    for value in state.values():
        if value.dim():
            value.data = value.data[:3]


def other_numbers(optimizer, params):
    optimizer.param_groups[0].update(lr=0.25, weight_decay=0.5)


def a_rate_in_a_tensor(optimizer, params):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)


def other_momentum(optimizer, params):
    """No buffers any more, or other bias corrections."""
    group = optimizer.param_groups[0]
    group.update({"momentum": 0.0} if "momentum" in group else {"betas": (0.5, 0.75)})


def dampened(optimizer, params):
    optimizer.param_groups[0]["dampening"] = 0.5


EDITS = (
    elsewhere, turned, smaller, other_numbers, a_rate_in_a_tensor, other_momentum, dampened,
    another_state, states_in_another_order, no_state, a_master, no_gradient, wider_gradients,
    groups_in_two, another_dtype,
)  # fmt: skip


def _forget(optimizer):
    metadata._kept.cache_clear()
    pointer_tables.TABLES._again.clear()
    vars(optimizer).pop("_apart", None)


def _trained(kind, edit, forgets, groups=1, shapes=SHAPES, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    rest = [{"params": [param]} for param in params[1:]] if groups > 1 else []
    optimizer = kind([{"params": params[:1], "lr": 0.5}, *rest] if rest else params, **options)
    memory = [torch.empty_like(param) for param in params]
    for number in range(6):
        for param, at in zip(params, memory, strict=True):
            grad = torch.randn(param.shape, generator=generator)
            param.grad = at.flatten()[: grad.numel()].view(grad.shape).copy_(grad).to(param.dtype)
        if number == 3:
            edit(optimizer, params)
        if forgets:
            _forget(optimizer)
        common.take_step("triton", optimizer)
    return [*params, *(x for s in optimizer.state.values() for x in s.values())]


def _assert_nothing_is_stale(*how, **more):
    found, expected = (_trained(*how, forgets, **more) for forgets in (False, True))
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_after_an_edit_a_step_is_that_of_one_that_forgets(kind, edit):
    _assert_nothing_is_stale(kind, edit)


def last_states_in_another_order(optimizer, params):
    optimizer.state[params[1]] = optimizer.state.pop(params[1])


@pytest.mark.parametrize("edit", [states_in_another_order, last_states_in_another_order])
def test_the_states_of_equal_weights_are_not_exchanged(edit):
    _assert_nothing_is_stale(KINDS["FusedSGD"], edit, shapes=[(5,)] * 3)


def nothing(optimizer, params):
    pass


@pytest.mark.parametrize("edit", [nothing, elsewhere, other_numbers])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
def test_groups_that_are_launched_apart(name, edit):
    _assert_nothing_is_stale(KINDS[name], edit, groups=3)


def late_decay(optimizer, params):
    optimizer.wd_after_momentum = True


def looks_ahead(optimizer, params):
    optimizer.param_groups[0]["nesterov"] = True


def another_scale(optimizer, params):
    """Of one step; the next has the numbers of the one before."""
    optimizer.most_recent_scale = 2.0


def a_rate_in_an_array(optimizer, params):
    """NumPy's, which each step writes in place."""
    rate = np.array(0.5)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.register_step_post_hook(lambda *_: np.multiply(rate, 0.5, out=rate))


def test_a_state_that_is_not_stepped_is_seen():
    """Without momentum there are no slots to look for."""
    for forgets in (False, True):
        found = _trained(FusedSGD, a_master, forgets, lr=0.5)
        assert torch.equal(found[1], found[-1])


@pytest.mark.parametrize(
    "edit", [nothing, late_decay, looks_ahead, another_scale, a_rate_in_an_array]
)
def test_numbers_of_a_launch_are_those_of_now(edit):
    _assert_nothing_is_stale(FusedSGD, edit, lr=0.1, momentum=0.5, weight_decay=0.25)


def test_a_launch_is_not_that_of_other_dtypes():
    """Where the tensors of one optimizer are, those of another are, of the same sizes."""
    memory, trained = torch.zeros(3, 8, dtype=torch.int16), {}
    for dtype in (torch.float16, torch.bfloat16):
        weight, grad, state = memory.view(dtype).unbind()
        param = torch.nn.Parameter(weight)
        trained[dtype] = FusedSGD([param], lr=0.5, momentum=0.5), param, grad, state
        trained[dtype][0].state[param]["momentum_buffer"] = state
    for dtype in (torch.float16, torch.float16, torch.bfloat16, torch.bfloat16, torch.float16):
        optimizer, param, grad, state = trained[dtype]
        with torch.no_grad():
            _ = param.fill_(1.0), grad.fill_(0.5), state.fill_(0.5)
        param.grad = grad.detach()
        common.take_step("triton", optimizer)
        assert (param.tolist(), state.tolist()) == ([0.625] * 8, [0.75] * 8)


def test_a_step_that_clips_is_not_that_of_one_that_does_not():
    _assert_nothing_is_stale(FusedAdam, nothing, max_grad_norm=0.5, eps=1.0)


def test_gradients_that_are_left_scaled_are_written():
    param = torch.nn.Parameter(torch.ones(4))
    grad, optimizer = torch.ones(4), FusedSGD([param], lr=0.5)
    for writes in (False, False, True, False):
        param.grad = grad.fill_(1.0).detach()
        with _runtime.use("triton"):
            optimizer.step_scaled(0.5, write_grads=writes)
        assert grad.tolist() == [0.5 if writes else 1.0] * 4
    assert param.tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_autograd_is_told_of_what_is_written(kind):
    """Weights that a graph has saved have other versions after a step, whoever has launched it."""
    param = torch.nn.Parameter(torch.ones(2, 2))
    grad, optimizer = torch.ones(2, 2), kind([param])
    for _ in range(4):
        param.grad = grad.detach()
        states = [x for state in optimizer.state.values() for x in state.values()]
        before = [x._version for x in (param, *states)]
        loss = (param * param).sum()
        common.take_step("triton", optimizer)
        assert all(x._version > was for x, was in zip((param, *states), before, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_nested_gradient_is_refused_in_words():
    """torch would end the process where it compares sizes of one, as it does in the middle."""
    params = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(7)]
    optimizer = FusedSGD(params, lr=0.1)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones(2, 2)
        common.take_step("triton", optimizer)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(2)])
    with _runtime.use("triton"), pytest.raises(TypeError, match="gradient 1 is a nested"):
        optimizer.step_scaled(grads={params[1]: nested})
