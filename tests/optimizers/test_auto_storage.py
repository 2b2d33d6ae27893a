"""``storage="auto"``: low bits for bfloat16 weights, plain for others, and checkpoints of both."""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from apex.ops.lists.storage import join_bits
from apex.optimizers import FusedAdam, FusedSGD
from tests import checkpoints
from tests.optimizers import common
from tests.optimizers.common import EVERY, PATHS, give_grads, on, parameters, same, train
from tests.saved_whole import make as saved_whole

SHAPES = ((64, 80), (7,), (), (0,), (3, 4, 5))
every = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(torch.nn.Module):
    """bfloat16 weights, and two in float32."""

    def __init__(self, seed=0):
        super().__init__()
        some = parameters(torch.bfloat16, SHAPES, seed) + parameters(shapes=SHAPES[:2], seed=seed)
        self.weights = torch.nn.ParameterList(some)


class Brain(torch.nn.Module):
    """bfloat16 weights alone."""

    def __init__(self, seed=0):
        super().__init__()
        self.weights = torch.nn.ParameterList(parameters(torch.bfloat16, SHAPES, seed))


def trained(make, seed=0, steps=2, net=Net, **options):
    net = net(seed)
    optimizer = make([*net.parameters()], **{"storage": "auto", **options})
    train(optimizer, [*net.parameters()], range(steps), "reference")
    return net, optimizer


def wide(net, optimizer):
    """The weights with their low bits, and all states."""
    found = []
    for param in net.parameters():
        state = optimizer.state[param]
        low = state.get("low_bits")
        found += [param.detach().clone() if low is None else join_bits(param.detach(), low)]
        found += [state[key].clone() for key in sorted(state)]
    return found


def goes_on(net, optimizer, others, other):
    """Assert that both have the same numbers, and after two more steps."""
    common.copy_into(others.parameters(), net.parameters())
    assert same(wide(net, optimizer), wide(others, other))
    for one, two in ((net, optimizer), (others, other)):
        train(two, [*one.parameters()], range(2, 4), "reference")
    assert same(wide(net, optimizer), wide(others, other))


def carried(way, saver, loader, folder):
    """Save one optimizer, load into another, each with its model: through a file or DCP."""
    if way == "file":
        loader[1].load_state_dict(common.through_a_file(saver[1].state_dict()))
        return
    saved = {"optimizer": get_optimizer_state_dict(*saver)}
    checkpoint.save(saved, checkpoint_id=folder, no_dist=True)
    here = {"optimizer": get_optimizer_state_dict(*loader)}
    checkpoint.load(here, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(*loader, here["optimizer"])


@pytest.mark.parametrize("path", PATHS)
@every
def test_each_dtype_is_stepped_in_its_own_way(make, path):
    shapes = SHAPES[1:] if path == "triton" else SHAPES
    brain, single = parameters(torch.bfloat16, shapes), parameters(shapes=shapes[:2])
    mixed = make([*brain, *single], storage="auto")
    alone = {}
    for storage, some in (("low_bits", brain), ("plain", single)):
        own = [torch.nn.Parameter(param.detach().clone()) for param in some]
        alone[storage] = own, make(own, storage=storage)
    for seed in range(2):
        give_grads([*brain, *single], seed)
        for some, (own, _) in zip((brain, single), alone.values(), strict=True):
            for mine, its in zip(own, some, strict=True):
                mine.grad = its.grad.clone()
        with on(path):
            mixed.step()
            for _, optimizer in alone.values():
                optimizer.step()
    if mixed._kinds() or mixed._largest_norm():  # one norm is over all of them
        return
    for (own, optimizer), some in zip(alone.values(), (brain, single), strict=True):
        assert same(some, own)
        for mine, its in zip(some, own, strict=True):
            checkpoints.assert_equal(mixed.state[mine], optimizer.state[its])


@every
@pytest.mark.parametrize("way", ["file", "DCP"])
@pytest.mark.parametrize("state", ["plain", "8bit"])
def test_low_bits_are_saved_and_loaded(make, way, state, tmp_path):
    net, optimizer = trained(make, state=state)
    others, other = trained(make, seed=1, state=state)
    carried(way, (net, optimizer), (others, other), tmp_path)
    goes_on(net, optimizer, others, other)


@every
@pytest.mark.parametrize("way", ["file", "DCP", "DCP, new"])
@pytest.mark.parametrize("state", ["plain", "8bit"])
def test_a_plain_checkpoint_is_loaded(make, way, state, tmp_path):
    """Low bits are 0 then: training goes on from the weights of 16 bits."""
    net, optimizer = trained(make, storage="plain", state=state)
    others, other = trained(make, seed=1, state=state, steps=0 if "new" in way else 2)
    text = "without low bits, so it continues from the bfloat16 weights"
    told = contextlib.nullcontext() if way == "file" else pytest.warns(UserWarning, match=text)
    with told:
        carried(way, (net, optimizer), (others, other), tmp_path)
    wanted = make([*net.parameters()], storage="auto", state=state)
    wanted.load_state_dict(optimizer.state_dict())
    for param in net.parameters():
        if param.dtype == torch.bfloat16:
            wanted.state[param]["low_bits"] = torch.zeros_like(param, dtype=torch.int16)
    for param in others.parameters():
        low = other.state[param].setdefault("low_bits", torch.zeros_like(param, dtype=torch.int16))
        assert not low.any()
        if param.dtype != torch.bfloat16:
            del other.state[param]["low_bits"]
    goes_on(net, wanted, others, other)


@every
@pytest.mark.parametrize("way", ["file", "DCP"])
@pytest.mark.parametrize("state", ["plain", "8bit"])
def test_plain_loads_it(make, way, state, tmp_path):
    net, optimizer = trained(make, state=state)
    others, other = trained(make, seed=1, storage="plain", state=state)
    carried(way, (net, optimizer), (others, other), tmp_path)
    for mine, its in zip(net.parameters(), others.parameters(), strict=True):
        state = {key: x for key, x in optimizer.state[mine].items() if key != "low_bits"}
        assert state.keys() == other.state[its].keys()
        for key, x in other.state[its].items():
            assert torch.equal(x, state[key].to(x.dtype))


@every
def test_low_bits_of_low_bits(make, tmp_path):
    """Through a file both ways; DCP does not read a key that it does not know; apex warns."""
    net, optimizer = trained(make, storage="low_bits", net=Brain)
    others, other = trained(make, seed=1, net=Brain)
    carried("file", (net, optimizer), (others, other), tmp_path)
    goes_on(net, optimizer, others, other)
    back = make([*others.parameters()], storage="low_bits")
    back.load_state_dict(common.through_a_file(other.state_dict()))
    assert same(wide(others, other), wide(others, back))
    with pytest.warns(UserWarning, match='into an optimizer with storage="low_bits", and pass'):
        carried("DCP", (net, optimizer), (others, other), tmp_path)


def test_an_optimizer_that_1_0_saved():
    old = torch.load(saved_whole.HERE / "adam-low-bits.pt", weights_only=False)["optimizer"]
    params = [param for group in old.param_groups for param in group["params"]]
    new = FusedAdam(params, storage="auto")
    new.load_state_dict(old.state_dict())
    for param in params:
        assert old.state[param]["low_bits"].any()
        for key, value in old.state[param].items():
            assert torch.equal(value, new.state[param][key])


def test_without_a_slot_the_key_stays(tmp_path):
    """So torch refuses a checkpoint that lacks it; the page has what to write then."""
    sides = []
    for storage in ("plain", "auto"):
        sides.append(trained(functools.partial(FusedSGD, lr=0.1), storage=storage))
    assert "low_bits" in sides[1][1].state_dict()["state"][0]
    with pytest.raises(checkpoint.api.CheckpointException, match="Missing key.*low_bits"):
        carried("DCP", *sides, tmp_path)
    net, optimizer = trained(functools.partial(FusedSGD, lr=0.1), steps=0)
    here = {"optimizer": get_optimizer_state_dict(net, optimizer)}
    planner = checkpoint.DefaultLoadPlanner(allow_partial_load=True)
    checkpoint.load(here, checkpoint_id=tmp_path, no_dist=True, planner=planner)
    set_optimizer_state_dict(net, optimizer, here["optimizer"])
    assert not any(state["low_bits"].any() for state in optimizer.state.values() if state)


def test_float64_states_hold_no_low_bits():
    """A model that was float64 has digits where low bits would be."""
    params, old = common.started(FusedAdam, torch.float64, SHAPES, steps=2)
    brain = [torch.nn.Parameter(param.detach().bfloat16()) for param in params]
    new = FusedAdam(brain, storage="auto")
    new.load_state_dict(old.state_dict())
    for param, was in zip(brain, params, strict=True):
        assert param.numel() == 0 or "low_bits" not in new.state[param]
        assert torch.equal(new.state[param]["exp_avg"], old.state[was]["exp_avg"].float())


@pytest.mark.parametrize("storage", ["plain", "auto"])
@pytest.mark.parametrize("value", [2.0**-160, 0.5 + 2.0**-50])
def test_moments_of_float64_come_back_whatever_their_digits_are(storage, value):
    """One is outside the range of float32, one has digits where low bits would be."""
    how = {"steps": 1, "storage": storage}
    params, optimizer = common.started(FusedAdam, torch.float64, [(5,)], **how)
    optimizer.state[params[0]]["exp_avg"].fill_(value)
    other = FusedAdam(params, storage=storage)
    other.load_state_dict(optimizer.state_dict())
    for state in (other.state[params[0]], optimizer.torch_state_dict()["state"][0]):
        assert state["exp_avg"].dtype == torch.float64
        assert state["exp_avg"].tolist() == [value] * 5


def test_moments_that_are_not_finite_come_back():
    how = {"steps": 1, "storage": "auto"}
    params, optimizer = common.started(FusedAdam, torch.bfloat16, [(5,)], **how)
    moment = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 1e-45])
    optimizer.state[params[0]]["exp_avg"] = moment.clone()
    low = optimizer.state[params[0]]["low_bits"]
    low.fill_(-3)
    other = FusedAdam(params, storage="auto")
    other.load_state_dict(optimizer.state_dict())
    state = other.state[params[0]]
    assert torch.equal(state["exp_avg"].view(torch.int32), moment.view(torch.int32))
    assert torch.equal(state["low_bits"], low)


def test_copies_and_torchs_state():
    net, optimizer = trained(EVERY["FusedAdam"])
    for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        checkpoints.assert_equal([*optimizer.state.values()], [*copied.state.values()])
    torchs = optimizer.torch_state_dict()["state"].values()
    for mine, its in zip(optimizer.state.values(), torchs, strict=True):
        assert its.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert torch.equal(mine["exp_avg"], its["exp_avg"])


def test_a_model_that_was_converted_is_refused():
    net, optimizer = trained(EVERY["FusedAdam"])
    net.float()
    give_grads([*net.parameters()], 5)
    with pytest.raises(RuntimeError, match="storage='auto' .* make a new optimizer"):
        optimizer.step()
