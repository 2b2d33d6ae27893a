"""``apex.parallel.DistributedDataParallel`` on two ranks: exact sums, and ranks that stay equal."""

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from apex.parallel import DistributedDataParallel, Reducer
from tests.parallel import wrapper_edges as edges
from tests.parallel import wrapper_programs as programs
from tests.ranks import RankError, Ranks

pytestmark = pytest.mark.dist


def _name(program):
    if isinstance(program, str):
        return ""
    function = getattr(program, "func", program).__name__
    words = [str(word) for word in getattr(program, "keywords", {}).values()]
    return " ".join([function, *words])


def _same(one, other):
    return one is other or torch.equal(one, other)


@pytest.mark.parametrize("program", [*programs.PROGRAMS, *edges.PROGRAMS], ids=_name)
def test_ranks_are_equal(two, program):
    first, second = two.run(program)
    assert len(first) == len(second) > 0
    assert all(map(_same, first, second))


@pytest.mark.slow
def test_four_ranks(tmp_path):
    """Sums of integers, of all ranks and in a group of the last three, whose first is rank 1."""
    with Ranks(tmp_path, count=4) as four:
        for options in ((), (("message_size", 7),), (("delay_allreduce", True),)):
            answers = four.run(functools.partial(programs.sums_are_exact, options=options))
            assert all(all(map(_same, answer, answers[0])) for answer in answers)
        answers = four.run(edges.in_a_group_of_three)
        assert all(all(map(_same, answer, answers[1])) for answer in answers[1:])


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ((), 0),
        ((("message_size", 4),), 3),
        ((("message_size", 8),), 1),
        ((("delay_allreduce", True),), 0),
    ],
)
def test_buckets_are_reduced_while_backward_goes_on(two, options, early):
    two.run(functools.partial(programs.reduced_early, options=options, early=early))


def test_what_differs_between_ranks_on_purpose(two):
    two.run(programs.in_a_group)
    two.run(programs.wide_communication)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (programs.other_modules, r"rank 1 differs from rank 0 .*'weight', 3, 2, .*'weight', 2, 2"),
        (
            programs.sparse_gradients,
            "'weight' is torch.float32 with layout torch.sparse_coo.*sparse=False",
        ),
        (
            functools.partial(programs.sums_that_are_accumulated, sync=True),
            "'w[0-9]', which is already a sum over ranks",
        ),
        (
            functools.partial(programs.sums_that_are_accumulated, sync=False),
            "'w[0-9]', which is already a sum over ranks",
        ),
        (edges.other_arguments, "rank 1 differs .*average=False.* rank 0 has .*average=True"),
        (edges.sums_that_were_clipped, "'weight', which is already a sum over ranks"),
        (edges.taken_by_a_later_hook, "another hook removed the gradient of"),
        (edges.one_rank_fails, "ended"),
        (programs.taken_by_another_hook, "another hook removed the gradient of .*'weight'"),
    ],
    ids=_name,
)
def test_refused_on_all_ranks(two, program, text):
    with pytest.raises(RankError, match=f"(?s)rank 0: .*{text}.*rank 1: .*{text}"):
        two.run(program)


@pytest.mark.parametrize("make", [DistributedDataParallel, Reducer])
def test_without_a_process_group(make):
    with pytest.raises(RuntimeError, match=r'torch.distributed.init_process_group\("nccl"\)'):
        make(torch.nn.Linear(1, 1))


@pytest.mark.usefixtures("group_of_one")
def test_arguments():
    layer = torch.nn.Linear(1, 1)
    for options, text in (
        ({"allreduce_trigger_params": [layer.weight], "delay_allreduce": True}, "exclude each"),
        ({"allreduce_trigger_params": [torch.ones(1)]}, "not a parameter of the module"),
        ({"gradient_predivide_factor": 0.0}, "is 0.0; it must be above 0"),
        ({"gradient_predivide_factor": float("inf")}, "is inf; it must be above 0 and finite"),
        ({"gradient_predivide_factor": float("nan")}, "is nan; it must be above 0 and finite"),
        (
            {"gradient_predivide_factor": 2.0, "gradient_average_split_factor": 2.0},
            "exclude each other",
        ),
        ({"allreduce_communicators": ([], [])}, r"\[\]\); it must be \(groups"),
        ({"allreduce_communicators": torch.distributed.group.WORLD}, "it must be .groups, streams"),
    ):
        with pytest.raises(ValueError, match=text):
            DistributedDataParallel(layer, **options)
    for arguments, options, text in (
        ((), {"device_ids": [0]}, "no argument device_ids. Leave it out: a module computes"),
        ((), {"misspelt": 1}, "no argument misspelt. Leave it out.$"),
        (([0],), {}, r"message_size is \[0\]; it must be a number.*device_ids, is not needed"),
        ((-1,), {}, "message_size is -1; it must be a number of elements, 0 or more"),
    ):
        with pytest.raises(TypeError, match=text):
            DistributedDataParallel(layer, *arguments, **options)
    with pytest.raises(TypeError, match=r"module is a list; it must be a torch.nn.Module"):
        DistributedDataParallel([layer])
    with pytest.raises(ValueError, match="'weight' is without a shape, which cannot be reduced"):
        DistributedDataParallel(torch.nn.LazyLinear(1))
    sharded = distribute_module(torch.nn.Linear(1, 1), init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="'weight' is a DTensor, which cannot be .*use fully_shar"):
        DistributedDataParallel(sharded)
    for options, text in (
        ({"shared_param": True}, "shared_param has no effect"),
        ({"num_allreduce_streams": 2}, "num_allreduce_streams has no effect"),
        ({"prof": True}, "prof has no effect"),
    ):
        with pytest.warns(UserWarning, match=text):
            DistributedDataParallel(layer, **options)


@pytest.mark.usefixtures("group_of_one")
def test_hooks_go_with_the_wrapper():
    layer = torch.nn.Linear(1, 1)
    DistributedDataParallel(layer)
    layer(torch.ones(1, 1)).backward()
    assert not layer.weight._post_accumulate_grad_hooks
    wrapper = DistributedDataParallel(layer)
    with torch.no_grad():
        wrapper(torch.ones(1, 1))
    assert len(layer.weight._post_accumulate_grad_hooks) == 1
