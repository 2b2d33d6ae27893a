"""``state="bfloat16"``: its rounding, steps on every path, checkpoints, and shards."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as checkpoint

from apex.catalogue import optimizers as catalogue
from apex.ops.lists.dither import dithered, seed_of
from apex.optimizers import FusedAdam, FusedSGD
from tests import checkpoints
from tests.optimizers import common
from tests.optimizers import eight_bit_programs as programs
from tests.optimizers.common import WITH_MASTERS, give_grads, parameters, same, started, train
from tests.tolerance import SAME_DITHER

CPU = torch.device("cpu")
SHAPES = ((66, 70), (7,), (), (0,), (3, 4, 5))
MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum"}
MAKERS = catalogue.makers(lr=0.02, weight_decay=0.1, max_grad_norm=0.0)
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def moments(optimizer):
    return [
        state[key] for state in optimizer.state.values() for key in sorted(MOMENTS & state.keys())
    ]


# -- rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.001, -3.1e-5, 6e-30])
def test_a_value_is_right_on_the_average_of_steps(value):
    """The mean is within four standard errors, and neighbouring steps are independent."""
    exact = torch.tensor([value])
    drawn = torch.cat([dithered(exact, seed_of(step, CPU)) for step in range(10_000)]).double()
    low, high = drawn.min(), drawn.max()
    share = float((exact.double() - low) / (high - low))
    error = (share * (1 - share) / len(drawn)) ** 0.5
    ups = (drawn == high).double()
    assert drawn.unique().tolist() == [low, high]
    assert (low.bfloat16(), high.bfloat16()) == (low, high)
    assert abs(float(ups.mean()) - share) <= 4 * error
    ups = (ups - ups.mean()) / ups.std()
    assert abs(float((ups[1:] * ups[:-1]).mean())) <= 4 / len(ups) ** 0.5


def test_values_of_one_step_are_right_on_the_average():
    exact = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 1
    off = (dithered(exact, seed_of(3, CPU)).double() - exact.double()) * 2**7  # in ulps
    assert abs(float(off.mean())) <= 4 * float(off.std()) / len(off) ** 0.5


def test_what_is_exact_stays():
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf")])
    for step in range(20):
        found = dithered(exact, seed_of(step, CPU))
        assert torch.equal(found.view(torch.int32), exact.view(torch.int32))
        assert dithered(nan, seed_of(step, CPU)).isnan()


def test_a_step_of_a_device_gives_the_same_seed():
    for step in (0, 1, 5, 2**30, 2**31 - 1):
        on_device = torch.tensor([step], dtype=torch.int32)
        assert torch.equal(seed_of(step, CPU), seed_of(on_device, CPU))
    assert seed_of(torch.ones(1, device="meta"), torch.device("meta")).is_meta


def test_a_second_moment_that_no_gradient_reaches_decays():
    param = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = FusedAdam([param], state="bfloat16")
    give_grads([param], 0)
    optimizer.step()
    before = optimizer.state[param]["exp_avg_sq"].double()
    param.grad.zero_()
    for _ in range(100):
        optimizer.step()
    left = optimizer.state[param]["exp_avg_sq"].double().sum() / before.sum()
    assert 0.85 < left < 0.95  # 0.999**100 is 0.905; rounded to the nearest it would be 1


# -- steps -----------------------------------------------------------------------------------------


@makers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_which_moments_are_bfloat16(make, dtype):
    _, optimizer = started(make, dtype, SHAPES, state="bfloat16", steps=2)
    kept = torch.float64 if dtype == torch.float64 else torch.bfloat16
    assert {x.dtype for x in moments(optimizer)} == {kept}


@makers
def test_the_kernel_and_the_definition_have_the_same_bits(make):
    """float32 weights: the interpreter truncates what it stores in bfloat16."""
    ends = []
    for path in ("triton", "reference", None):
        how = {"shapes": SHAPES[1:], "steps": 2, "path": path, "state": "bfloat16"}
        params, optimizer = started(make, **how)
        ends.append([*params, *moments(optimizer)])
    if not optimizer._kinds():  # norms are added up in another order
        of_kernel, of_definition = (torch.cat([x.flatten() for x in one]) for one in ends[:2])
        assert (of_kernel == of_definition).double().mean() >= SAME_DITHER
    assert same(ends[1], ends[2])


def test_the_step_is_read_on_its_device():
    """``capturable``: a graph that is replayed rounds by other bits each time."""
    ends = []
    for capturable in (False, True):
        how = {"lr": 0.02, "state": "bfloat16", "capturable": capturable}
        params, optimizer = started(FusedAdam, shapes=SHAPES, steps=3, **how)
        ends.append([*params, *moments(optimizer)])
    assert same(*ends)


def test_a_skipped_step_changes_nothing():
    options = {"lr": 0.1, "momentum": 0.9, "state": "bfloat16"}
    params, optimizer = started(FusedSGD, shapes=SHAPES, steps=1, **options)
    before = [x.clone() for x in moments(optimizer)]
    give_grads(params, 1)
    optimizer.step_scaled(1.0, torch.ones(()))
    assert same(before, moments(optimizer))
    assert optimizer.param_groups[0]["step"] == 1


@pytest.mark.parametrize("path", ["triton", None])
@pytest.mark.parametrize("storage", ["auto", "low_bits", "kahan", "stochastic"])
def test_storages_are_independent_of_it(storage, path):
    """But for the stochastic one, by whose seed the moments are rounded too."""
    params = parameters(torch.bfloat16, SHAPES[1:2])
    exact = common.widened(params)
    optimizer = FusedAdam(params, storage=storage, state="bfloat16")
    other = FusedAdam(exact, state="bfloat16")
    common.give_both(params, exact, 0)
    common.take_step(path, optimizer)
    other.step()
    assert storage == "stochastic" or same(moments(optimizer), moments(other))
    assert moments(optimizer)[0].dtype == torch.bfloat16


def test_masters_have_it_too():
    for make, options in WITH_MASTERS.items():
        some, optimizer = started(make, torch.bfloat16, SHAPES[:1], state="bfloat16", **options)
        train(optimizer, some, range(2))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, some, range(2, 3))
        assert optimizer.state[some[0]]["exp_avg"].dtype == torch.bfloat16
        assert optimizer.state[some[0]]["master_param"].dtype == torch.float32


# -- checkpoints -----------------------------------------------------------------------------------


@makers
def test_a_saved_state_goes_on_with_the_same_bits(make):
    params, optimizer = started(make, shapes=SHAPES, state="bfloat16", steps=2)
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    other = make(others, state="bfloat16")
    other.load_state_dict(common.through_a_file(optimizer.state_dict()))
    for copied in (other, pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert same(moments(optimizer), moments(copied))
    assert same(train(optimizer, params, range(2, 4)), train(other, others, range(2, 4)))
    assert same(moments(optimizer), moments(other))


@makers
@pytest.mark.parametrize("state", ["plain", "8bit"])
def test_states_are_converted_on_loading(make, state):
    params = parameters(shapes=SHAPES)
    theirs, brain = make(params, state=state), make(params, state="bfloat16")
    train(theirs, params, range(2))
    brain.load_state_dict(theirs.state_dict())
    wide = make(params)
    wide.load_state_dict(theirs.state_dict())
    rounded = [x.bfloat16() for x in moments(wide)]
    assert same(moments(brain), rounded)
    theirs.load_state_dict(brain.state_dict())
    wide.load_state_dict(brain.state_dict())
    assert same(moments(wide), [x.float() for x in rounded])
    train(brain, params, range(2, 3))
    train(theirs, params, range(2, 3))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("saved", "here"), [("bfloat16", "plain"), ("plain", "bfloat16")])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad"])
def test_distributed_checkpoints_convert_too(name, saved, here, tmp_path):
    sides = []
    for seed, state in enumerate((saved, here)):
        params = parameters(shapes=SHAPES, seed=seed)
        optimizer = MAKERS[name](params, state=state)
        train(optimizer, params, range(seed, seed + 2))
        sides.append(optimizer)
    checkpoint.save(sides[0].state_dict(), checkpoint_id=tmp_path, no_dist=True)
    loaded = sides[1].state_dict()
    checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    sides[1].load_state_dict(loaded)
    pairs = zip(moments(sides[0]), moments(sides[1]), strict=True)
    assert all(torch.equal(mine.to(its.dtype), its) for mine, its in pairs)
    assert moments(sides[1])[0].dtype == (torch.float32 if here == "plain" else torch.bfloat16)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
def test_torchs_state_has_no_more_keys(name):
    found = []
    for state in ("plain", "bfloat16"):
        _, optimizer = started(MAKERS[name], shapes=SHAPES, state=state, steps=2)
        saved = optimizer.torch_state_dict()
        found.append((*saved["param_groups"], *({*one} for one in saved["state"].values())))
    assert found[0] == found[1]


def test_sgd_without_momentum_has_no_state():
    with pytest.raises(ValueError, match='state="bfloat16" stores momentum buffers'):
        FusedSGD(parameters(), lr=0.1, state="bfloat16")


# -- shards ----------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("name", programs.MAKERS)
@pytest.mark.slow
def test_numbers_do_not_depend_on_how_many_ranks_share(four, name):
    answers = four.run(programs.stepped, name, None, "bfloat16")
    for answer in answers:
        for kept in answer.values():
            if name not in programs.NORMED:
                checkpoints.assert_equal(kept, answers[0][1])
    assert [len(answer) for answer in answers] == [3, 3, 2, 2]
