"""What each of four ranks does in :mod:`tests.amp.scaling.test_grad_scaler`.

Rows of a square of ranks are data-parallel, columns tensor-parallel. Some programs use ranks 0 and
1 alone; the others must not be needed, as the workers of a rollout.
"""

import copy
import functools
import math
import pickle
import runpy
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from apex import amp
from apex.optimizers import FusedAdam, FusedSGD
from tests.amp.ranks.agreement_programs import recipes

SCALE = 1024.0
THEIRS, OURS = torch.amp.GradScaler, amp.GradScaler
USERS = (0, 1)  # of the mesh of two ranks


@functools.cache
def square():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@functools.cache
def two():
    """A mesh of two of the four ranks; all ranks call it."""
    return DeviceMesh("cpu", list(USERS))


def on_two(program):
    """Run a program on the mesh of two ranks alone; the others answer ``None``."""

    @functools.wraps(program)
    def run(rank, *args):
        mesh = two()
        return program(rank, mesh, *args) if rank in USERS else None

    return run


def leaf(*shape, seed=0, dtype=torch.float32):
    value = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return nn.Parameter(value.to(dtype))


def placed(param, mesh, *placements):
    return nn.Parameter(distribute_tensor(param.detach(), mesh, placements))


def whole(param):
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()


def give(param, value):
    """Set a gradient, which is the same on all ranks."""
    is_dtensor = isinstance(param, DTensor)
    value = value.to(param.dtype)
    param.grad = (
        distribute_tensor(value, param.device_mesh, param.placements) if is_dtensor else value
    )


def spoil(param):
    grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
    grad.view(-1)[0] = math.inf


def stepped(scaler, optimizer, scaled=None):
    """One step; the scale after it, and whether it was taken."""
    scaler.scale(torch.ones(()))
    if scaled is not None:
        scaled()
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    scaler.step(optimizer)
    scaler.update()
    now = [p for group in optimizer.param_groups for p in group["params"]]
    return scaler.get_scale(), any(not _same(a, b) for a, b in zip(before, now, strict=True))


def _same(a, b):
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in (a, b)]
    return torch.equal(*parts)


# -- (a) to (e) ------------------------------------------------------------------------------------


@on_two
def float16_shards(rank, mesh, kind):
    """(a): parameters and gradients in float16, of fully_shard; an overflow in the second step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).half()
    alone = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    make = functools.partial(FusedAdam, lr=0.01)
    optimizer, other = make(model.parameters()), make(alone.parameters())
    scaler, found = kind("cpu", init_scale=SCALE), []
    for step in range(3):
        for number, (param, plain) in enumerate(
            zip(model.parameters(), alone.parameters(), strict=True)
        ):
            value = torch.randn(plain.shape, generator=torch.Generator().manual_seed(number))
            value = value * 2.0**-9 * scaler.get_scale()
            give(param, value)
            plain.grad = value.half().float().mul(1 / scaler.get_scale()).to(plain.dtype)
            plain.wide = value.half().float().mul(1 / scaler.get_scale())
        if step == rank == 1:
            spoil(next(model.parameters()))
        found.append(stepped(scaler, optimizer))
        if step != 1:
            other.step_scaled(grads={p: p.wide for p in alone.parameters()})
    weights = [whole(p) for p in model.parameters()]
    return found, weights, [p.detach() for p in alone.parameters()]


@on_two
def mixed_kinds(rank, mesh, kind):
    """(b): a DTensor and plain tensors in one optimizer; only the shard of rank 1 overflows."""
    params = [placed(leaf(4, 3), mesh, Shard(0)), leaf(3, seed=1)]
    alone = [leaf(4, 3), leaf(3, seed=1)]
    scaler, found = kind("cpu", init_scale=SCALE), []
    optimizer, other = (torch.optim.SGD(some, lr=0.5) for some in (params, alone))
    for step in range(2):
        for number, (param, plain) in enumerate(zip(params, alone, strict=True)):
            value = leaf(*plain.shape, seed=number).detach()
            give(param, value * SCALE)
            plain.grad = value
        if step == rank == 1:
            spoil(params[0])
        found.append(stepped(scaler, optimizer))
        if step == 0:
            other.step()
    return found, [whole(p) for p in params], [p.detach() for p in alone]


@on_two
def no_gradients(rank, mesh, clip):
    """(c): rank 0 has no gradient, in the second step rank 1 overflows; the norm if clipped."""
    params = [placed(leaf(4, 3), mesh, Shard(0)), placed(leaf(2, 2), mesh, Shard(1))]
    optimizer = FusedSGD(params, lr=0.5)
    scaler, found, norms = OURS("cpu", init_scale=SCALE), [], []
    for step in range(2):
        for param in params:
            param.grad = None if rank == 0 else torch.full_like(param, 2.0 * scaler.get_scale())
        if step == rank == 1:
            spoil(params[0])

        def before():
            if clip:
                norms.append(scaler.clip_grad_norm_(optimizer, 1.0).item())

        found.append(stepped(scaler, optimizer, before))
    return found, norms


def over_tp_only(rank, kind):
    """(d): a weight that is sharded over tp alone; an inf on rank 1."""
    param = placed(leaf(4, 4), square()["tp"], Shard(0))
    optimizer = torch.optim.SGD([param], lr=0.5)
    scaler, found = kind("cpu", init_scale=SCALE), []
    for step in range(2):
        give(param, torch.full((4, 4), SCALE))
        if step == 0 and rank == 1:
            spoil(param)
        found.append(stepped(scaler, optimizer))
    return found


def over_tp_with_amp(rank):
    """The same with ``amp.initialize``."""
    amp.reset()
    model = nn.Linear(4, 4, bias=False)
    model.weight = placed(leaf(4, 4), square()["tp"], Shard(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(
        model, optimizer, opt_level="O0", loss_scale="dynamic", init_scale=SCALE, verbosity=0
    )
    with amp.scale_loss(torch.ones((), requires_grad=True) * 1.0, optimizer) as scaled:
        scaled.backward()
        give(model.weight, torch.full((4, 4), SCALE))
        if rank == 1:
            spoil(model.weight)
    optimizer.step()
    found = amp.outcome(optimizer).numbers()
    amp.reset()
    return found


@on_two
def replicas_that_differ(rank, mesh, kind):
    """(e): gradients of replicas of which only that of rank 0 is finite."""
    param = placed(leaf(3), mesh, Replicate())
    local = torch.full((3,), SCALE)
    param.grad = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    if rank == 1:
        spoil(param)
    return stepped(kind("cpu", init_scale=SCALE), torch.optim.SGD([param], lr=0.5))


# -- more than one kind of group -------------------------------------------------------------------


@on_two
def parts_of_a_sum(rank, mesh):
    """A Partial gradient: the sum is finite, or overflows though each part is finite."""
    found = []
    for size in (2.0, 3e38):
        param = placed(leaf(3), mesh, Replicate())
        part = torch.full((3,), size)
        param.grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)
        before = whole(param)
        answer = stepped(OURS("cpu", init_scale=4.0), torch.optim.SGD([param], lr=1.0))
        found.append((*answer, (before - whole(param)).tolist()))
    return found


def stages(rank):
    """Two stages of a pipeline, each of plain tensors and shards of its own: who skips."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    param = placed(leaf(4), meshes[rank // 2], Shard(0))
    optimizer = FusedSGD([param, leaf(2)], lr=0.5)
    found = []
    for group in (groups[rank % 2], dist.group.WORLD, None):
        scaler = OURS("cpu", init_scale=SCALE, process_group=group)
        for tensor in optimizer.param_groups[0]["params"]:
            give(tensor, torch.ones(tensor.shape))
        if rank == 3:
            spoil(param)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
            found.append((*stepped(scaler, optimizer), calls.call_count))
    return found


def copies_of_groups(rank):
    """What pickling a scaler with a group says, and a pickled scaler of all ranks."""
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    paired, world = (OURS("cpu", process_group=group) for group in (pair, dist.group.WORLD))
    pickled = pickle.dumps(world)
    for copied in (copy.copy(paired), copy.deepcopy(paired)):
        assert copied.process_group is pair
    for copied in (copy.deepcopy(world), pickle.loads(pickled)):
        assert copied.process_group is dist.group.WORLD
    try:
        pickle.dumps(paired)
    except RuntimeError as error:
        return str(error), pickled
    return None


def norm_over_all(rank, order, make):
    """Norm and weights of sharded, replicated and plain parameters, and in float64 alone."""
    mesh = square()
    shapes = [(4, 6), (6, 4), (3,), (5, 2)]
    alone = [leaf(*shape, seed=number) for number, shape in enumerate(shapes)]
    params = [
        placed(alone[0], mesh, Shard(0), Shard(1)),
        placed(alone[1], mesh["tp"], Shard(1)),
        placed(alone[2], mesh, Replicate(), Replicate()),
        nn.Parameter(alone[3].detach().clone()),
    ]
    optimizer = make(params)
    exact = [nn.Parameter(param.detach().double()) for param in alone]
    for number, (param, plain) in enumerate(zip(params, exact, strict=True)):
        value = leaf(*plain.shape, seed=50 + number).detach()
        give(param, value * SCALE)
        plain.grad = value.double()
    scaler = OURS("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    norm = scaler.clip_grad_norm_(optimizer, 0.5, order)
    expected = torch.nn.utils.clip_grad_norm_(exact, 0.5, order)
    scaler.step(optimizer)
    scaler.update()
    torch.optim.SGD(exact, lr=0.5).step()
    return norm, expected, [whole(p) for p in params], [p.detach() for p in exact]


@on_two
def plain_beside_sharded(rank, mesh):
    """Two optimizers of one scaler, one of plain tensors: scales where that one overflows."""
    found = []
    plain, shards = leaf(2), placed(leaf(4), mesh, Shard(0))
    both = [torch.optim.SGD([plain], lr=0.5), torch.optim.SGD([shards], lr=0.5)]
    scaler = OURS("cpu", init_scale=SCALE)
    for _ in range(2):
        scaler.scale(torch.ones(()))
        give(plain, torch.ones(2))
        give(shards, torch.ones(4))
        if rank == 1:
            spoil(plain)
        for optimizer in both:
            scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), *(bool(scaler.stepped(one)) for one in both)))
    return found


def two_worlds(rank):
    """Messages for parameters on two root meshes, in one optimizer and in one scaler's."""
    mesh, other = square(), init_device_mesh("cpu", (4,))
    first, second = placed(leaf(4), mesh["dp"], Shard(0)), placed(leaf(4), other, Shard(0))
    said = []

    def refused(scaler, *optimizers):
        scaler.scale(torch.ones(()))
        for param in (first, second):
            give(param, torch.full((4,), SCALE))
        try:
            for optimizer in optimizers:
                scaler.step(optimizer)
        except RuntimeError as error:
            said.append(str(error))
        return second.grad.to_local().eq(SCALE).all().item()

    def sgd(*params):
        return torch.optim.SGD(params, lr=0.5)

    untouched = refused(OURS("cpu", init_scale=SCALE), sgd(first, second))
    untouched &= refused(OURS("cpu", init_scale=SCALE), sgd(first), sgd(second))
    world = OURS("cpu", init_scale=SCALE, process_group=dist.group.WORLD)
    refused(world, sgd(first, second))
    return said, untouched


@on_two
def outsiders(rank, mesh):
    """Two ranks train with a policy in float16; the others never call anything."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    scaler, found = OURS("cpu", init_scale=SCALE), []
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        factor = math.inf if step == rank == 1 else 1.0
        scaler.scale(model(x).float().square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(scaler.outcome(optimizer).numbers())
    return found


# -- the recipe of docs/distributed.md -------------------------------------------------------------

WIDTH, CLASSES = 8, 3


def batches(seeds, part=slice(None)):
    """Batches of 8, or a part of each."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, WIDTH, generator=generator)
        yield x[part], torch.randint(0, CLASSES, (8,), generator=generator)[part]


def made(names, half):
    torch.manual_seed(0)
    model = names["Model"](WIDTH, CLASSES)
    size = dist.get_world_size()
    return names["sharded"](model.half() if half else model, init_device_mesh("cpu", (size,)))


def state(model, optimizer, scaler):
    """Weights, moments and scale, whole."""
    params = list(model.parameters())
    moments = [x for p in params for x in optimizer.state[p].values()]
    tensors = [x for x in moments if isinstance(x, torch.Tensor)]
    return [*map(whole, params)], [*map(whole, tensors)], scaler.state_dict()


def recipe(rank, page, folder, half):
    """States: saved, restored, gone on straight, gone on restored; norms and outcomes seen."""
    names, part = recipes(page, "float16 on shards"), slice(4 * rank, 4 * rank + 4)
    first = made(names, half)
    names["train"](*first, batches(range(6), part))
    names["save"](*first, folder)
    saved = state(*first)
    names["train"](*first, batches(range(6, 10), part))
    second = made(names, half)
    names["load"](*second, folder)
    restored = state(*second)
    names["train"](*second, batches(range(6, 10), part))
    numbers = [scaler.outcome(optimizer).numbers() for _, optimizer, scaler in (first, second)]
    return saved, restored, state(*first), state(*second), numbers


def recipe_alone(page, folder, half):
    """What one process restores of it, and has after it went on."""
    names = recipes(page, "float16 on shards")
    parts = made(names, half)
    names["load"](*parts, folder)
    restored = state(*parts)
    names["train"](*parts, batches(range(6, 10)))
    return restored, state(*parts)


def reinforced(rank, program):
    """Rewards and first ratios of the example, the dtypes seen, and the outcome."""
    names = runpy.run_path(str(program))
    size = dist.get_world_size()
    model, optimizer, scaler = names["policy"](init_device_mesh("cpu", (size,)))
    seen = set()
    model[2].register_forward_hook(lambda layer, x, y: seen.add(y.dtype))
    rewards, ratios = names["train"](
        model, optimizer, scaler, torch.Generator().manual_seed(rank), rollouts=40
    )
    stored = {p.dtype for p in model.parameters()}
    weights = [whole(p) for p in model.parameters()]
    return rewards, ratios, seen, stored, weights, scaler.outcome(optimizer).numbers()
