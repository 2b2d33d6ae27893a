"""What each of four ranks does in :mod:`tests.optimizers.test_eight_bit`."""

import functools

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from apex.catalogue.optimizers import WITH_8_BITS, makers
from apex.optimizers import FusedAdam
from tests import checkpoints
from tests.optimizers.common import normal, on
from tests.ranks import error_of

OURS = makers(lr=0.02, weight_decay=0.1, max_grad_norm=0.0)
MAKERS = {name: OURS[name] for name in WITH_8_BITS}
NORMED = ("FusedLAMB", "FusedNovoGrad")  # a norm of a weight's whole step is in the weight
# Rows in uneven shards, two ranks without a row, three dimensions, and a state in float32: a shard
# alone of each of the first three has less than 4,096 elements.
SHAPES = ((66, 70), (2, 2100), (37, 4, 30), (5, 7))


@functools.cache
def meshes():
    return {count: DeviceMesh("cpu", range(count)) for count in (2, 4)}


tensors = functools.partial(normal, shapes=SHAPES)


def full(tensor):
    return getattr(tensor.detach(), "full_tensor", tensor.detach)()


class Training:
    """Steps on given gradients; ``count`` ranks share the tensors, 1 is a process alone."""

    def __init__(self, name, count, path=None, state="8bit"):
        self.count, self.path = count, path
        made = [torch.nn.Parameter(self.spread(x)) for x in tensors(0)]
        self.model = torch.nn.ParameterList(made)
        self.optimizer = MAKERS[name](self.model.parameters(), state=state)

    def spread(self, tensor):
        if self.count == 1:
            return tensor
        return distribute_tensor(tensor, meshes()[self.count], [Shard(0)])

    def step(self, seeds):
        for seed in seeds:
            for param, grad in zip(self.model, tensors(seed), strict=True):
                param.grad = self.spread(grad)
            with on(self.path):
                self.optimizer.step()

    def kept(self):
        """Weights and state, whole."""
        states = [self.optimizer.state[param] for param in self.model]
        return [[full(param) for param in self.model]] + [
            {key: full(value) for key, value in state.items()} for state in states
        ]

    def talks(self):
        if self.count == 1:
            return {"no_dist": True}
        return {"process_group": meshes()[self.count].get_group()}

    def save(self, folder):
        saved = checkpoints.parts(self.model, self.optimizer)
        checkpoint.save(saved, checkpoint_id=folder, **self.talks())

    def load(self, folder):
        checkpoints.load(self.model, self.optimizer, folder, **self.talks())


def stepped(rank, name, path, state="8bit"):
    """What is kept after three steps on 1, 2 and 4 ranks, of those that this one is among."""
    meshes()
    found = {}
    for count in (1, 2, 4):
        if rank < count or count == 1:
            training = Training(name, count, path, state)
            training.step(range(1, 4))
            found[count] = training.kept()
    return found


def chained(rank, name, folder, count, before, seed, state="8bit"):
    """One stage of a training: load what other ranks saved, step, save; what is kept then."""
    meshes()
    if rank >= count:
        return None
    training = Training(name, count, "reference", state)
    if before:
        training.load(f"{folder}/{before}")
    training.step([seed])
    training.save(f"{folder}/{count}")
    return training.kept()


def refused(rank):
    """What is said of shards of other dimensions; small ones and copies are taken."""
    mesh, found = meshes()[4], []
    for shape, place in (((64, 64), Shard(1)), ((8, 8), Shard(1)), ((64, 64), Replicate())):
        param = torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [place]))
        found.append(error_of(FusedAdam, [param], state="8bit"))
    return found


def fully_sharded(rank):
    """Training with FSDP2: types and bytes of the state, and the losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    fully_shard(model, mesh=meshes()[4])
    optimizer = FusedAdam(model.parameters(), lr=0.01, state="8bit", max_grad_norm=1.0)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(10):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weight = optimizer.state[model[0].weight]
    placed = all(isinstance(value, DTensor) for value in weight.values())
    bytes_here = sum(value.to_local().nbytes for value in weight.values())
    return losses, placed, bytes_here
