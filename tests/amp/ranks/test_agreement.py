"""Ranks that hold parts of one model take or skip each step together.

What ranks do is in :mod:`tests.amp.ranks.agreement_programs` and
:mod:`tests.amp.ranks.sharded_programs`, with the same in one process by hand.
"""

import functools
import pathlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex import amp
from apex._compat import IS_2_13
from apex.amp.casting import cpu_float16
from apex.optimizers import FusedAdam
from tests.amp.ranks import agreement_programs as programs
from tests.amp.ranks import sharded_programs
from tests.amp.ranks.agreement_programs import SCALE, Case
from tests.amp.ranks.sharded_programs import BAD, Parallel, Sharded
from tests.amp.scaling import scaler_programs
from tests.amp.training import no_waits, same
from tests.ranks import RankError
from tests.tolerance import HALF_SHARDS, PARALLEL, assert_close_to_largest, each


@pytest.fixture(autouse=True)
def _float16_computes_in_float32():
    cpu_float16.begin(torch.float16, ["cpu"])  # by hand too


pytestmark = pytest.mark.dist
ROOT = pathlib.Path(__file__).parents[3]
PAGE = ROOT / "docs" / "distributed.md"
REINFORCED = ROOT / "examples" / "reinforcement_learning" / "on_shards.py"


def _assert_steps(found, expected):
    """Assert that two trainings had the same numbers after each step, bit for bit."""
    decisions = [[(step.taken, step.scale) for step in steps] for steps in (found, expected)]
    assert decisions[0] == decisions[1]
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert same(one.weights, other.weights), f"step {number}"


# -- process_group ---------------------------------------------------------------------------------

CASES = {
    "one pass": Case(),
    "each rank": Case(bad=((0, 1, 0), (1, 3, 0))),
    "first of two passes": Case(passes=2),
    "last of two delayed passes": Case(passes=2, delay=True, bad=((0, 1, 1),)),
    "three passes, two losses": Case(passes=3, losses=2, bad=((0, 2, 1),)),
    "clipped": Case(clip=0.1),
    "no gradients on the other rank": Case(idle=((0, 1, 0), (0, 2, 0))),
    "no gradients anywhere": Case(idle=((0, 1, 0), (1, 1, 0)), bad=()),
    "no gradients in a pass": Case(passes=2, idle=((0, 1, 0), (1, 2, 1))),
    "unchecked": Case(unchecked=True),
    "fused": Case(adam=True, fused=True),
    "fused, no gradients in a pass": Case(adam=True, fused=True, passes=2, idle=((0, 1, 0),)),
    "deferred": Case(adam=True, deferred=True, idle=((0, 1, 0),)),
    "deferred, fused": Case(adam=True, deferred=True, fused=True, passes=2, delay=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_group_takes_or_skips_each_step_together(pair, name):
    """Two models as if they were one; each step has one all-reduce.

    With delay_overflow_check the block's end and the step reduce: the next check needs both.
    """
    case = CASES[name]
    by_hand = programs.halves_by_hand(case)
    for rank, (steps, calls) in enumerate(pair.run(functools.partial(programs.halves, case=case))):
        _assert_steps(steps, by_hand[rank])
        assert calls == [2 if case.unchecked else 1] * case.steps


@pytest.mark.parametrize("group", ["none", "own"])
def test_a_rank_outside_of_the_group_is_not_affected(pair, group):
    case = Case(group=group)
    alone = programs.halves_by_hand(case._replace(bad=()))[0]
    affected = programs.halves_by_hand(case)[1]
    answers = pair.run(functools.partial(programs.halves, case=case))
    for (steps, calls), expected in zip(answers, (alone, affected), strict=True):
        _assert_steps(steps, expected)
        assert calls == [0] * case.steps


def test_ranks_of_which_one_reduces_everything_in_the_block(pair):
    (found, weights), (others, other_weights) = pair.run(programs.beside_a_wrapper)
    assert found == others == [(3.0, True, 128.0), (3.0, False, 64.0), (3.0, True, 64.0)]
    assert same(weights, other_weights)


def test_too_many_skipped_steps_end_the_job_on_all_ranks(pair):
    (step, elsewhere), (other_step, here) = pair.run(programs.never_finite)
    assert step == other_step == 2
    assert "All gradients of this optimizer on this rank are finite" in elsewhere
    assert "The first non-finite gradient is that of parameter '2.weight'" in here


def test_a_job_says_it_once(pair):
    first, second = pair.run(programs.told)
    assert [line for line in first if "overflow" in line] == [
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 64.0"
    ]
    assert second == []


@pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")
def test_the_recipe_for_two_halves_of_a_model(pair):
    weights, scale = programs.pipeline_by_hand()
    assert scale == 2.0**15
    first, second = pair.run(functools.partial(programs.pipeline, page=PAGE))
    assert same([*first[0], *second[0]], weights)
    assert first[1] == second[1] == scale


# -- DTensors --------------------------------------------------------------------------------------

HALF, BFLOAT = torch.float16, torch.bfloat16
SHARDED = [
    Sharded("O0"),
    Sharded("O4"),
    Sharded("O0", HALF),
    Sharded("O1", HALF),
    Sharded("O4", BFLOAT),
    Sharded("O1", mesh=(1, 2)),
    Sharded("O1", mesh=(2, 1)),
    Sharded("O1", adam=True, deferred=True),
    Sharded("O1", passes=2),
    Sharded("O1", passes=2, delay=True),
    Sharded("O0", HALF, passes=2, delay=True, sync=False),
]


def _name(case):
    changed = {name: value for name, value in case._asdict().items() if value}
    return "-".join(f"{name}={value}" for name, value in changed.items())


@pytest.mark.parametrize("case", SHARDED, ids=_name)
def test_an_overflow_in_one_shard_skips_the_step_everywhere(pair, case):
    """Bit for bit as in one process; each step has one all-reduce."""
    by_hand = sharded_programs.sharded_by_hand(case)
    assert [step.taken for step in by_hand] == [step != BAD for step in range(case.steps)]
    assert by_hand[BAD].scale == SCALE / 2
    for steps, calls in pair.run(functools.partial(sharded_programs.sharded, case=case)):
        _assert_steps(steps, by_hand)
        assert case.mesh != (2,) or calls == [1] * case.steps


def _assert_close(steps, others):
    each(assert_close_to_largest, steps[-1].weights, others[-1].weights, PARALLEL)


def test_shards_are_clipped_by_their_common_norm(pair):
    case = Sharded("O1", clip=0.1)
    by_hand = sharded_programs.sharded_by_hand(case)
    for steps, _ in pair.run(functools.partial(sharded_programs.sharded, case=case)):
        _assert_close(steps, by_hand)


PARALLEL_CASES = [
    Parallel("plain norm", "norm", passes=2),
    Parallel("plain norm", "up", clip=0.1),
    Parallel("sequence", "norm", clip=0.1),
    Parallel("sequence", "up", backwards=True),  # the first gradient is the same on all ranks
    Parallel("sequence", value=1e-3),
]


@pytest.mark.parametrize("case", PARALLEL_CASES, ids=_name)
def test_tensor_parallel_models(pair, case):
    """DTensors of several placements beside other tensors, as in one process."""
    answers = pair.run(functools.partial(sharded_programs.parallel, case=case))
    _assert_steps(answers[0][0][0], answers[1][0][0])
    for (steps, norm), (alone, exact) in answers:
        assert [(s.taken, s.scale) for s in steps] == [(s.taken, s.scale) for s in alone]
        assert [step.taken for step in steps] == [step != BAD for step in range(case.steps)]
        _assert_close(steps, alone)
        if case.clip:
            assert type(norm) is torch.Tensor
            assert_close_to_largest(norm, exact, PARALLEL)


def test_what_programs_do_between_blocks(pair):
    taken = [True, True, True, False, True, True]
    assert pair.run(programs.two_optimizers) == [(taken, 64.0)] * 2
    assert pair.run(programs.dropped) == [(64.0, True, 64.0)] * 2
    assert pair.run(programs.with_a_static_scale) == [0, 0]
    with pytest.raises(RankError, match="(?s)rank 0.*zero_grad.. on every rank.*rank 1.*on every"):
        pair.run(programs.cleared_by_hand)


@pytest.mark.filterwarnings("ignore")  # torch's own, of FSDP1 on a CPU
def test_fsdp1_with_a_dynamic_scale_needs_a_group(pair):
    job = sharded_programs.sharded_by_fsdp1
    steps = [(True, 2.0**16), (False, 2.0**15), (True, 2.0**15)]
    assert pair.run(functools.partial(job, group="both", level="O1")) == [steps, steps]
    assert pair.run(functools.partial(job, group="none", level="O4")) == [[(True, 1.0)] * 3] * 2
    for group, level in (("none", "O1"), ("both", "O2")):
        with pytest.raises(RankError, match="process_group=torch.distributed.group.WORLD"):
            pair.run(functools.partial(job, group=group, level=level))


@pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")
def test_the_recipe_for_fsdp2(pair, tmp_path):
    """What it trains, and that its checkpoint resumes bit for bit."""
    job = functools.partial(sharded_programs.sharded_recipe, page=PAGE, folder=str(tmp_path))
    for (shards, state), (others, other_state), dtypes in pair.run(job):
        assert same(shards, others)
        assert state == other_state
        assert dtypes == [torch.float16, torch.float32]


@pytest.mark.skipif(not REINFORCED.exists(), reason="not in a checkout")
@pytest.mark.slow
def test_the_example_of_reinforcement_learning(pair):
    """float32 shards, float16 products, ratios of exactly 1 before a step, and that it learns."""
    answers = pair.run(functools.partial(scaler_programs.reinforced, program=REINFORCED))
    for rewards, ratios, seen, stored, weights, numbers in answers:
        assert (seen, stored) == ({torch.float16}, {torch.float32})
        assert bool((ratios == 1).all())
        assert rewards[0] < 0.4
        assert min(rewards[-5:]) > 0.8
        stepped, taken, skipped, scale = numbers
        assert (stepped, taken + skipped) == (True, 80)
        assert same(weights, answers[0][4])
        assert scale == 2.0 ** (16 - skipped)


@pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")
@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.slow
def test_the_recipe_for_float16_on_shards(pair, tmp_path, half):
    """Restored bit for bit on two ranks and on one; trained on bit for bit on two."""
    job = functools.partial(scaler_programs.recipe, page=PAGE, folder=str(tmp_path), half=half)
    answers = pair.run(job)
    alone, gone_on_alone = scaler_programs.recipe_alone(PAGE, str(tmp_path), half)
    for saved, restored, straight_on, gone_on, numbers in answers:
        assert numbers == [(True, 5, 0, 2.0**16), (True, 2, 0, 2.0**16)]
        for one, other in ((saved, restored), (straight_on, gone_on), (saved, alone)):
            assert same([*one[0], *one[1]], [*other[0], *other[1]])
            assert one[2] == other[2]
        assert not same(saved[0], straight_on[0])
        each(assert_close_to_largest, gone_on_alone[0], straight_on[0], HALF_SHARDS)


# -- devices ---------------------------------------------------------------------------------------


@pytest.fixture
def _fake_group(monkeypatch):
    """Four ranks, of which this is the first; no collective of theirs computes anything."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # torch 2.14's DTensor asks the module of a mesh's device how many devices a host has.
    monkeypatch.setattr(torch, "meta", torch.cpu, raising=False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    amp.reset()
    dist.destroy_process_group()


@pytest.mark.skipif(not IS_2_13, reason="torch 2.13 has collectives of meta tensors, 2.9 has not")
@pytest.mark.usefixtures("_fake_group")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("in_shards", [False, True])
def test_the_host_waits_for_no_agreement(in_shards, fused):
    """Four ranks in a mesh of two dimensions, one of which some parameters lack; or in a group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    with torch.device("meta"):
        model = nn.Linear(8, 16)
    if in_shards:
        mesh = init_device_mesh("meta", (2, 2), mesh_dim_names=("data", "tensor"))
        weight, bias = model.weight.detach()[:4], model.bias.detach()[:8]
        shards = DTensor.from_local(weight, mesh, [Shard(0), Shard(0)], run_check=False)
        model.weight = nn.Parameter(shards)
        shards = DTensor.from_local(bias, mesh["data"], [Shard(0)], run_check=False)
        model.bias = nn.Parameter(shards)
    optimizer = FusedAdam(model.parameters())
    group = None if in_shards else dist.group.WORLD
    amp.initialize(model, optimizer, verbosity=0, fused_step=fused, process_group=group)
    with no_waits(), mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.zeros((), device="meta", requires_grad=True) * 1.0
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
                for param in model.parameters():
                    param.grad = torch.zeros_like(param)
            if in_shards:
                amp.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
    sizes = [call.kwargs["group"].size() for call in spy.call_args_list]
    assert sizes == ([2, 2] + [2, 2] if in_shards else [4]) * 3  # shards have norms too
