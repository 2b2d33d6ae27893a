"""What each of two ranks does in :mod:`tests.optimizers.test_placements`."""

import functools
import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from apex.contrib import optimizers as contrib
from apex.contrib.clip_grad import clip_grad_norm_
from apex.optimizers import FusedAdam, FusedSGD
from apex.parallel import LARC
from tests import checkpoints
from tests.optimizers.common import EVERY, normal, on
from tests.ranks import error_of

MAKERS = {
    **EVERY,
    "LARC": lambda params: LARC(FusedSGD(params, lr=0.5, weight_decay=0.1)),
    "clipped": lambda params: FusedAdam(params, lr=0.02, max_grad_norm=0.5),
    "contrib": lambda params: contrib.FusedAdam(params, lr=0.02, max_grad_norm=0.5),
}
WITH_NORMS = ("clipped", "contrib", "FusedLAMB", "FusedNovoGrad", "LARC")
SHAPES = ((5, 7), (4, 3), (1, 6))  # some in uneven shards, one that rank 1 has nothing of
PLACED = {  # placements of a weight, and of its gradient
    "partial": (Replicate(), Partial()),
    "partial for shards": (Shard(0), Partial()),
    "other shards": (Shard(0), Shard(1)),
    "replicated for shards": (Shard(1), Replicate()),
    "shards for replicated": (Replicate(), Shard(1)),
    "as the weight": (Shard(0), Shard(0)),
}


@functools.cache
def mesh():
    return init_device_mesh("cpu", (2,))


def spread(tensor, placement):
    """A DTensor; of a ``Partial`` one each rank holds half of every element."""
    if placement.is_partial():
        return DTensor.from_local(tensor / 2, mesh(), [placement], run_check=False)
    return distribute_tensor(tensor, mesh(), [placement])


tensors = functools.partial(normal, shapes=SHAPES)


def stepped(rank, name, case, path="reference", *, waits=False):
    """Weights of two steps, as DTensors and by a lone process; the gradients' placements."""
    weight, grad = PLACED[case]
    params = [torch.nn.Parameter(spread(x, weight)) for x in tensors(0)]
    alone = [torch.nn.Parameter(x) for x in tensors(0)]
    several, one = MAKERS[name](params), MAKERS[name](alone)
    for seed in (1, 2):
        for param, other, value in zip(params, alone, tensors(seed), strict=True):
            param.grad, other.grad = spread(value, grad), value
            if waits:  # of what a collective has not sent yet
                param.grad = param.grad.redistribute(placements=param.placements, async_op=True)
        with on(path):
            several.step()
            one.step()
    weights = [param.detach().full_tensor() for param in params]
    as_weights = all(param.grad.placements == param.placements for param in params)
    return weights, [param.detach() for param in alone], as_weights


def norms(rank, order):
    """Norm and gradients after clipping, of all kinds of placements together."""
    cases = [*PLACED.values(), None]  # the last is no DTensor
    params, alone = [], []
    for number, case in enumerate(cases):
        for value, grad in zip(tensors(number), tensors(100 + number), strict=True):
            other = torch.nn.Parameter(value.double())
            other.grad = grad.double()
            alone.append(other)
            param = torch.nn.Parameter(spread(value, case[0]) if case else value)
            param.grad = spread(grad, case[1]) if case else grad
            params.append(param)
    norm = clip_grad_norm_(params, 0.5, order)
    exact = torch.nn.utils.clip_grad_norm_(alone, 0.5, order)
    grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in params]
    return norm, exact, grads, [param.grad for param in alone]


def refused(rank, name):
    """Messages for a gradient on another mesh, and for a weight that is a sum over ranks."""
    param = torch.nn.Parameter(spread(torch.ones(4, 2), Replicate()))
    optimizer = MAKERS[name]([param])
    other = init_device_mesh("cpu", (2, 1))
    param.grad = distribute_tensor(torch.ones(4, 2), other, [Replicate(), Replicate()])
    found = error_of(optimizer.step)
    assert param.detach().full_tensor().eq(1).all()
    terms = torch.nn.Parameter(spread(torch.ones(4, 2), Partial()))
    return found, error_of(MAKERS[name], [terms])


def resumed(rank, make, storage, folder, then=None):
    """How many numbers differ between a training that goes on and one that was saved and loaded.

    With another storage ``then`` the one that goes on has it too, by ``load_state_dict`` alone.
    """

    def made(storage=then or storage):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)).bfloat16()
        fully_shard(model, mesh=mesh())
        return model, EVERY[make](model.parameters(), storage=storage)

    def train(model, optimizer, seeds):
        for seed in seeds:
            x = torch.randn(8, 7, generator=torch.Generator().manual_seed(seed)).bfloat16()
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def another(model, optimizer):
        saved, other = optimizer.state_dict(), EVERY[make](model.parameters(), storage=then)
        other.load_state_dict(saved)
        return model, other

    def first():
        return made(storage)

    how = {} if then is None else {"first": first, "change": another}
    with warnings.catch_warnings(record=True) as caught:
        pairs, keys = checkpoints.resumed(made, train, folder, **how)
    kinds = {type(one) for pair in pairs for one in pair}
    different = sum(int((a.to_local() != b.to_local()).sum()) for a, b in pairs)
    said = [str(one.message) for one in caught if "low bits" in str(one.message)]
    return different, kinds <= {DTensor, torch.nn.Parameter}, keys, said


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


def tensor_parallel(rank, options):
    """Weights of a block in tensor and sequence parallelism, and of one process."""
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(5))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    alone, parallel = Block(), parallelize_module(Block(), mesh(), plan)
    one = FusedAdam(alone.parameters(), lr=0.01, **options)
    several = FusedAdam(parallel.parameters(), lr=0.01, **options)
    for _ in range(3):
        for model, optimizer in ((alone, one), (parallel, several)):
            given = x if model is alone else x.chunk(2, 1)[rank].contiguous()
            out = model(given)
            (out if model is alone else out.full_tensor()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = [param.detach().full_tensor() for param in parallel.parameters()]
    return weights, [param.detach() for param in alone.parameters()]
