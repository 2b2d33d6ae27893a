"""What each of four ranks does in :mod:`tests.optimizers.test_fused_muon`."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from apex.optimizers import FusedMuon, _muon_shards
from tests import checkpoints
from tests.optimizers.common import normal
from tests.ranks import error_of

# Uneven shards, one that two ranks have nothing of, a stack, a vector and a convolution.
SHAPES = ((9, 6), (6, 9), (9, 6), (1, 5), (7, 7), (5,), (2, 3, 2, 2))
MESHES = {  # shape of a mesh, and how weights are placed on it
    "Shard(0)": ((4,), [Shard(0)]),
    "Shard(1)": ((4,), [Shard(1)]),
    "replicated": ((4,), [Replicate()]),
    "hybrid": ((2, 2), [Replicate(), Shard(0)]),
    "two shards": ((2, 2), [Shard(0), Shard(1)]),
    "one dimension twice": ((2, 2), [Shard(0), Shard(0)]),
}


@functools.cache
def mesh(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def spread(tensor, case):
    """A DTensor; replicated where it lacks the dimension."""
    shape, placements = MESHES[case]
    fit = [p if p.is_replicate() or p.dim < tensor.dim() else Replicate() for p in placements]
    return distribute_tensor(tensor, mesh(*shape), fit)


def whole(tensor):
    """``full_tensor()``; of two shards one after the other, of which it warns."""
    tensor = tensor.detach()
    if any(hasattr(place, "split_factor") for place in tensor.placements):
        return tensor.full_tensor()
    for dim in reversed(range(tensor.device_mesh.ndim)):
        places = [*tensor.placements]
        places[dim] = Replicate()
        tensor = tensor.redistribute(placements=places)
    return tensor.to_local()


tensors = functools.partial(normal, shapes=SHAPES)


class Calls:
    """Counts all-to-alls, and notes the shapes of the matrices that this rank orthogonalises."""

    def __enter__(self):
        self.count, self.shapes = 0, []
        self.real = dist.all_to_all_single, _muon_shards.orthogonalized
        dist.all_to_all_single, _muon_shards.orthogonalized = self.sent, self.computed
        return self

    def __exit__(self, *error):
        dist.all_to_all_single, _muon_shards.orthogonalized = self.real

    def sent(self, *args, **more):
        self.count += 1
        return self.real[0](*args, **more)

    def computed(self, directions, *args):
        self.shapes += [tuple(one.shape) for one in directions]
        return self.real[1](directions, *args)


def stepped(rank, case, **options):
    """Weights of three steps on given gradients, as DTensors and of one process; calls of one."""
    params = [nn.Parameter(spread(x, case)) for x in tensors(0)]
    alone = [nn.Parameter(x) for x in tensors(0)]
    several, one = (FusedMuon(p, lr=0.02, flatten=True, **options) for p in (params, alone))
    for seed in (1, 2, 3):
        for param, other, value in zip(params, alone, tensors(seed), strict=True):
            param.grad, other.grad = spread(value, case), value
        one.step()
        with Calls() as calls:
            several.step()
    return [*map(whole, params)], [p.detach() for p in alone], calls.count, calls.shapes


def in_batches(rank, sent):
    """:func:`stepped`, with at most so many elements of each rank in a collective."""
    usual, _muon_shards.SENT = _muon_shards.SENT, sent
    try:
        return stepped(rank, "Shard(0)")
    finally:
        _muon_shards.SENT = usual


def stack_of_experts(rank):
    """A stack of four matrices, sharded between them: each rank has a whole one."""
    (start, grad), case = tensors(0, shapes=[(4, 5, 7)] * 2), "Shard(0)"
    param, alone = nn.Parameter(spread(start, case)), nn.Parameter(start.clone())
    param.grad, alone.grad = spread(grad, case), grad
    FusedMuon([alone]).step()
    with Calls() as calls:
        FusedMuon([param]).step()
    return whole(param), alone.detach(), calls.count


def without_gradients(rank, nowhere):
    """Ranks 1 and 3, or all, have no gradient of the first weight."""
    params = [nn.Parameter(spread(x, "Shard(0)")) for x in tensors(0)[:3]]
    alone = [nn.Parameter(x) for x in tensors(0)[:3]]
    several, one = FusedMuon(params, lr=0.02), FusedMuon(alone, lr=0.02)
    for param, other, value in zip(params, alone, tensors(1), strict=False):
        param.grad, other.grad = spread(value, "Shard(0)"), value
    rows = [slice(3, 6), slice(9, None)]  # of ranks 1 and 3, of nine
    for some in rows:
        alone[0].grad[some] = 0
    if rank % 2 or nowhere:
        params[0].grad = None
    if nowhere:
        alone[0].grad = None
    several.step()
    one.step()
    kept = [p.detach().clone() for p in alone]
    for some in rows:
        kept[0][some] = tensors(0)[0][some]
    return [*map(whole, params)], kept


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(10, 24), nn.LayerNorm(24), nn.Linear(24, 8)

    def forward(self, x):
        return self.down(self.norm(self.up(x)).tanh()).clone()  # FSDP warns of a view


def sharded(kind):
    """A model: FSDP on four ranks, on two copies of two, or over tensor parallelism."""
    model = Net()
    if kind == "tensor parallel":
        on = mesh(2, 2)
        plan = {
            "up": ColwiseParallel(output_layouts=Replicate()),
            "down": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(model, on["tp"], plan)
        return fully_shard(model, mesh=on["dp"]), on["dp"]
    on = mesh(2, 2) if kind == "hybrid" else mesh(4)
    return fully_shard(model, mesh=on), on


def trained(rank, kind, **options):
    """Weights after steps on parts of a batch, and on the whole batch by one process."""
    (several, on), alone = sharded(kind), Net()
    place, count = rank, 4
    if kind == "tensor parallel":
        place, count = on.get_local_rank(), 2
    makers = [FusedMuon(m.named_parameters(), lr=0.02, **options) for m in (several, alone)]
    for seed in range(5):
        x, y = tensors(seed, shapes=[(16, 10), (16, 8)])
        for model, optimizer in zip((several, alone), makers, strict=True):
            part = slice(None)
            if model is several:
                part = slice(place * 16 // count, (place + 1) * 16 // count)
            (model(x[part]) - y[part]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = [whole(param) for param in several.parameters()]
    return weights, [param.detach() for param in alone.parameters()]


def strided(rank, **options):
    """Weights of a step on given gradients, of FSDP over tensor parallelism and of one process."""
    several, alone = sharded("tensor parallel")[0], Net()
    makers = [FusedMuon(m.named_parameters(), lr=0.02, **options) for m in (several, alone)]
    for number, (param, other) in enumerate(
        zip(several.parameters(), alone.parameters(), strict=True)
    ):
        (other.grad,) = tensors(number, shapes=[other.shape])
        here = other.grad
        for dim, place in reversed([*enumerate(param.placements)]):  # tensor parallelism is first
            if not place.is_replicate():
                here = here.chunk(2, place.dim)[param.device_mesh.get_local_rank(dim)]
        param.grad = DTensor.from_local(here, param.device_mesh, param.placements, run_check=False)
    for optimizer in makers:
        optimizer.step()
    weights = [whole(param) for param in several.parameters()]
    return weights, [param.detach() for param in alone.parameters()]


def resumed(rank, kind, folder):
    """How many numbers differ between a training that goes on and one that was saved and loaded."""

    def made():
        model, _ = sharded(kind)
        model.bfloat16()
        return model, FusedMuon(model.named_parameters(), lr=0.02, storage="low_bits")

    def train(model, optimizer, seeds):
        for seed in seeds:
            (x,) = tensors(seed, shapes=[(4, 10)])
            model(x.bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    pairs, keys = checkpoints.resumed(made, train, folder)
    placed = all(one.placements == two.placements for one, two in pairs)
    return sum(int((a.to_local() != b.to_local()).sum()) for a, b in pairs), placed, keys


def refused(rank):
    """Messages for placements that cannot be collected; nothing has changed."""
    terms = DTensor.from_local(torch.ones(4, 2), mesh(4), [Partial()], run_check=False)
    optimizer = FusedMuon([torch.zeros(2, 2)])
    found = [error_of(optimizer.add_param_group, {"params": [nn.Parameter(terms)]})]
    assert len(optimizer.param_groups) == 1
    param = nn.Parameter(spread(torch.ones(4, 2), "Shard(0)"))
    param.grad = distribute_tensor(torch.ones(4, 2), mesh(2, 2), [Replicate(), Shard(0)])
    found.append(error_of(FusedMuon([param]).step))
    assert param.to_local().eq(1).all()
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns of torch.jit

    both = [torch.ones(2, 2), torch.ones(2)]
    return [*found, error_of(ZeroRedundancyOptimizer, both, FusedMuon, lr=0.1)]
