"""What each rank does in :mod:`tests.optimizers.test_fused_muon`."""

import functools

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from apex.optimizers import FusedMuon

SHAPES = ((9, 6), (6, 9), (9, 6), (1, 5), (3, 4, 6), (7, 7), (5,), (2, 3, 2, 2))
MESHES = {  # shape of a mesh, and how weights are placed on it
    "Shard(0)": ((-1,), [Shard(0)]),
    "Shard(1)": ((-1,), [Shard(1)]),
    "replicated": ((-1,), [Replicate()]),
    "hybrid": ((2, -1), [Replicate(), Shard(0)]),
    "two shards": ((2, -1), [Shard(0), Shard(1)]),
    "twice": ((2, -1), [Shard(0), Shard(0)]),
}


@functools.cache
def mesh(shape):
    world = torch.distributed.get_world_size()
    known = -1 * torch.tensor(shape).prod().item()
    shape = tuple(world // known if size == -1 else size for size in shape)
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def stepped(rank, case, **options):
    """Weights of three steps on given gradients: of DTensors, and of one process."""
    shape, placements = MESHES[case]
    on = mesh(shape)

    def spread(x):
        some = [p if p.is_replicate() or p.dim < x.dim() else Replicate() for p in placements]
        return distribute_tensor(x, on, some)

    params = [torch.nn.Parameter(spread(x)) for x in tensors(0)]
    alone = [torch.nn.Parameter(x) for x in tensors(0)]
    several, one = (FusedMuon(p, lr=0.02, flatten=True, **options) for p in (params, alone))
    for seed in (1, 2, 3):
        for param, other, value in zip(params, alone, tensors(seed), strict=True):
            param.grad, other.grad = spread(value), value
        several.step()
        one.step()
    weights = [param.detach().full_tensor() for param in params]
    return weights, [param.detach() for param in alone]
