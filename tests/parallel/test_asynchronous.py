"""Each asynchronous collective is waited for before its result is read."""

import ast
import gc
import pathlib

import pytest
import torch
import torch.nn.functional as F

import apex
from apex.ops.lists.tensor_lists import local
from apex.optimizers import FusedAdam
from tests.late import RECEIVED, late
from tests.tolerance import integers

SOURCE = pathlib.Path(apex.__file__).parent
WHOLE_NUMBERS = 8, 6  # of an input: sums are exact

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed"),
    # torch's, of a backend that sends nothing
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


def _gradients(model, x):
    return torch.autograd.grad(model(x).square().sum(), [*model.parameters()])


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


# -- each program begins what is named beside it -------------------------------------------------


def wrapper(model, patch, **options):
    from apex.parallel import DistributedDataParallel

    x = torch.randn(5, 4)
    wanted = _gradients(model, x)
    with late(patch, ranks=2) as network:
        DistributedDataParallel(model, **options)(x).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))
    return network


def wrapper_at_the_end(model, patch):
    return wrapper(model, patch, delay_allreduce=True)


def wrapper_in_buckets(model, patch):
    return wrapper(model, patch, message_size=1)


def wrapper_by_the_originals_functions(model, patch):
    from apex.parallel import DistributedDataParallel, Reducer

    with late(patch, ranks=2) as network:
        ddp = DistributedDataParallel(model)
        bucket = [torch.ones(3), torch.full((2, 2), 3.0)]
        assert ddp.allreduce_bucket(bucket, 0, False).tolist() == [1.0] * 3 + [3.0] * 4
        ddp.allreduce_maybe_retain(bucket, 0)
        assert bucket[1].tolist() == [[3.0] * 2] * 2
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        Reducer(model).reduce()
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    return network


def sharded(model, patch, redundant=False, **options):
    """Weights and state of three steps are FusedAdam's."""
    from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

    plain = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    plain.load_state_dict(model.state_dict())
    alone = FusedAdam(plain.parameters(), lr=0.1)
    with late(patch, ranks=1) as network:
        groups = {"redundant_process_group": torch.distributed.new_group([0])} if redundant else {}
        optimizer = DistributedFusedAdam(model.parameters(), lr=0.1, **groups, **options)
        for _ in range(3):
            x = torch.randn(5, 4)
            for net, one in ((plain, alone), (model, optimizer)):
                net(x).square().sum().backward()
                one.step()
                one.zero_grad()
        optimizer.param_sync()
        begun = len(network.works)
        saved, wanted = optimizer.state_dict()["state"], alone.state_dict()["state"]
        assert len(network.works) == begun + 3 * len(optimizer._buckets)
        for number, p in enumerate(plain.parameters()):
            assert torch.equal(saved[number]["param"], p)
            for slot in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(saved[number][slot], wanted[number][slot])
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    return network


def sharded_overlapping(model, patch):
    return sharded(model, patch, overlap_param_sync=True, bucket_cap_mb=1e-5)


def sharded_in_buffers(model, patch):
    return sharded(model, patch, contiguous_grad_buffer=True, contiguous_param_buffer=True)


def sharded_and_redundant(model, patch):
    return sharded(model, patch, redundant=True)


def sharded_and_read(model, patch):
    """Whoever reads a parameter waits, also outside of a module and after the optimizer's end."""
    from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

    other = torch.nn.Parameter(torch.ones(3))  # of no module: step itself waits
    old = [p.detach().clone() for p in (other, *model.parameters())]
    with late(patch, ranks=1) as network:
        made = [
            DistributedFusedAdam(params, lr=0.1, overlap_param_sync=True, bucket_cap_mb=1e-5)
            for params in (model.parameters(), [other])
        ]
        (model(torch.ones(1, 4)).sum() + other.sum()).backward()
        for optimizer in made:
            optimizer.step()
        pending = [len(optimizer._gathers) for optimizer in made]
        assert not torch.equal(model[0].weight, old[1])
        assert (pending, len(made[0]._gathers)) == ([4, 0], 3)
        del made, optimizer
        gc.collect()
        with torch._C.DisableTorchFunctionSubclass():  # as a compiled extension reads them
            assert not any(map(torch.equal, (other, *model.parameters()), old))
    return network


def a_parameter_without_a_gradient(model, patch):
    """Whether another rank has one is asked."""
    from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam

    before = [p.detach().clone() for p in model.parameters()]
    with late(patch, ranks=1) as network:
        optimizer = DistributedFusedAdam(model.parameters(), lr=0.1)
        model[0](torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.param_sync()
    same = [torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert same == [False, False, True, True]
    return network


def _linear(patch, reduced, in_parts, fused=False):
    """The gradients of a layer of whole numbers; ``in_parts``: both ranks have the same part."""
    from apex.transformer import parallel_state
    from apex.transformer.tensor_parallel import layers

    x, weight, bias = integers(*WHOLE_NUMBERS), integers(5, 6), integers(5)
    dy = integers(16 if in_parts else 8, 5)
    whole = torch.cat([x, x]) if in_parts else x
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    weight.main_grad = torch.zeros_like(weight)
    with late(patch, ranks=2) as network:
        parallel_state.initialize_model_parallel(2)
        try:
            apply = layers.linear_with_grad_accumulation_and_async_allreduce
            y = apply(x, weight, bias, fused, reduced, in_parts)
            y.backward(dy)
        finally:
            parallel_state.destroy_model_parallel()
    assert torch.equal(y, F.linear(whole, weight, bias))
    dx = dy @ weight * (2 if reduced or in_parts else 1)
    assert torch.equal(x.grad, dx[:8])
    assert torch.equal(weight.main_grad if fused else weight.grad, dy.t() @ whole)
    assert torch.equal(bias.grad, dy.sum(0))
    return network


def linear(model, patch):
    return _linear(patch, True, False)


def linear_of_a_sequence_in_parts(model, patch):
    return _linear(patch, False, True)


def linear_that_accumulates(model, patch):
    return _linear(patch, False, True, fused=True)


def stages(model, patch):
    """The first of two stages of a pipeline, then the second."""
    from apex.transformer import parallel_state
    from apex.transformer.pipeline_parallel import p2p_communication as p2p

    with late(patch, ranks=2) as network:
        parallel_state.initialize_model_parallel(1, 2)
        try:
            patch.setattr(parallel_state, "current_device", lambda: torch.device("cpu"))
            p2p.send_forward(torch.ones(2))
            assert [work.is_over for work in network.works] == [True]
            gradient = p2p.recv_backward((3,))
            assert gradient.tolist() == [RECEIVED] * 3
            both = p2p.send_forward_recv_backward(torch.ones(2), (2,), async_comm=True)
            assert both.tensor.isnan().all()
            assert both.get().tolist() == [RECEIVED] * 2
            parallel_state.set_pipeline_model_parallel_rank(1)
            p2p.send_backward(torch.ones(2), (2,))
            assert [work.is_over for work in network.works] == [True] * 5
            assert p2p.recv_forward((3,)).tolist() == [RECEIVED] * 3
        finally:
            parallel_state.destroy_model_parallel()
    return network


BUCKET = "parallel/_bucket.py begin"
FLAT = {"ops/lists/collectives.py reduce_scatter", "ops/lists/collectives.py all_gather"}
PRESENT = "contrib/optimizers/_sharded.py _find_present"
GATHER = "transformer/tensor_parallel/mappings.py gather"
PART = "transformer/tensor_parallel/mappings.py reduce_scatter"
PROGRAMS = {
    wrapper: {BUCKET},
    wrapper_at_the_end: {BUCKET},
    wrapper_in_buckets: {BUCKET},
    wrapper_by_the_originals_functions: {BUCKET},
    sharded: {*FLAT, PRESENT},
    sharded_overlapping: {*FLAT, PRESENT},
    sharded_in_buffers: {*FLAT, PRESENT},
    sharded_and_read: {*FLAT, PRESENT},
    sharded_and_redundant: {*FLAT, PRESENT, "ops/lists/shards.py receive"},
    a_parameter_without_a_gradient: {*FLAT, PRESENT},
    linear: {"transformer/tensor_parallel/_linear.py _backward"},
    linear_of_a_sequence_in_parts: {GATHER, PART},
    linear_that_accumulates: {GATHER, PART},
    stages: {"transformer/pipeline_parallel/p2p_communication.py _communicate"},
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_comes_late_is_waited_for(program, model, monkeypatch):
    network = program(model, monkeypatch)
    found = {f"{pathlib.Path(file).relative_to(SOURCE).as_posix()} {name}"
             for file, name in network.begun}  # fmt: skip
    assert found == PROGRAMS[program]
    assert all(work.is_over for work in network.works)


def _begins(call):
    options = {option.arg: option.value for option in call.keywords}
    name = getattr(call.func, "attr", "")
    return "async_op" in options or name in ("batch_isend_irecv", "isend", "irecv")


def test_every_asynchronous_collective_is_in_a_program():
    """With a new one: add it to `tests.late` and to a program above."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        text = file.read_text("utf-8")
        if "async_op" in text or "isend" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and any(
                    isinstance(one, ast.Call) and _begins(one) for one in ast.walk(node)
                ):
                    found.add(f"{file.relative_to(SOURCE).as_posix()} {node.name}")
    assert found == set().union(*PROGRAMS.values())


def test_a_part_of_a_dtensor_that_is_not_sent_yet():
    class Part:
        def wait(self):
            return torch.ones(2)

    class Wrapper:
        def to_local(self):
            return Part()

    assert torch.equal(local(Wrapper()), torch.ones(2))
