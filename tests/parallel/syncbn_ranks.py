"""What each of two processes does for test_sync_batchnorm.py; see tests/amp/ranks/cells.py."""

import copy
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.parallel import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from tests.ranks import error_of

CHANNELS = 16


class Case(NamedTuple):
    """A layer, and what it is called with on each rank.

    Attributes:
        name: What the test is called.
        sizes: Batch of each rank.
        trailing: Dimensions of the input behind batch and channels.
        dtype: Of the input.
        own: dtype of weights and buffers.
        options: Of the layer, as pairs.
        has_z: Whether ``z`` is added.
        memory_format: Of the input.
        program: How the layer is used.
        steps: Forwards and backwards.
        input_grad: Whether the input of each rank needs a gradient.
        frozen: Whether weights need no gradient.
    """

    name: str
    sizes: tuple = (5, 3)
    trailing: tuple = (7,)
    dtype: torch.dtype = torch.float64
    own: torch.dtype = torch.float64
    options: tuple = ()
    has_z: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    program: str = "once"
    steps: int = 2
    input_grad: tuple = (True, True)
    frozen: bool = False


def make(case):
    """The layer, with weights that are neither 1 nor 0."""
    torch.manual_seed(1)
    layer = SyncBatchNorm(CHANNELS, **dict(case.options))
    for parameter in layer.parameters():
        nn.init.normal_(parameter).requires_grad_(not case.frozen)
    return layer.to(case.own)


def batches(case, step):
    """Input, ``z`` and output gradient of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    shape = (sum(case.sizes), CHANNELS, *case.trailing)
    x, z, dy = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    tensors = [(x * 3 + 2), z if case.has_z else None, dy]
    if dict(case.options).get("channel_last"):
        tensors = [None if t is None else t.movedim(1, -1).contiguous() for t in tensors]
    return [None if t is None else t.to(case.dtype) for t in tensors]


def use(program, layer, x, z):
    """The programs: they are the same for the whole batch and for a part of it."""
    if program == "twice":
        return layer(layer(x, z) + x, z)
    if program in ("reentrant", "recomputed"):
        return checkpoint(layer, x, z, use_reentrant=program == "reentrant")
    y = layer(x, z)
    return nn.functional.relu(y, inplace=True) if program == "relu_in_place" else y


def results(case, layer, parameters, forward, part=slice(None), input_grad=True):
    """Run ``case`` on a part of the batch: tensors of the last step, and statistics, by name."""
    for step in range(case.steps):
        x, z, dy = (None if t is None else t[part] for t in batches(case, step))
        if isinstance(layer, Reference):
            x, z, dy = (None if t is None else t.double() for t in (x, z, dy))
        x = x.contiguous(memory_format=case.memory_format)
        x.requires_grad_(input_grad)
        z = z if z is None else z.requires_grad_()
        for parameter in parameters:
            parameter.grad = None
        y = use(case.program, forward, x, z)
        if y.requires_grad:
            y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, "dz": None if z is None else z.grad}
    found |= {f"d{n}": p.grad for n, p in layer.named_parameters()}
    return found | dict(layer.named_buffers()), y.requires_grad, y.is_contiguous()


class Reference(_BatchNorm):
    """Torch's batch norm for inputs of any number of dimensions."""

    def _check_input_dim(self, input):
        pass


def expected(case):
    """The same by torch's batch norm, in float64 and one process, on the whole batch."""
    layer, options = make(case), dict(case.options)
    channel_last, relu = options.pop("channel_last", False), options.pop("fuse_relu", False)
    reference = Reference(CHANNELS, **options).double()
    reference.load_state_dict(layer.state_dict())

    def forward(x, z):
        y = reference(x.movedim(-1, 1)).movedim(1, -1) if channel_last else reference(x)
        y = y if z is None else y + z
        return y.relu() if relu else y

    return results(case, reference, list(reference.parameters()), forward)[0]


def run_case(case, rank):
    """Run a case on this rank's part of the batch."""
    layer = make(case)
    part = slice(sum(case.sizes[:rank]), sum(case.sizes[: rank + 1]))
    return results(case, layer, list(layer.parameters()), layer, part, case.input_grad[rank])


def without_partner(rank):
    """What must not communicate: rank 0 alone calls it."""
    if rank == 1:
        return []
    x, found = torch.randn(4, 3, 5), []
    for options in ({}, {"channel_last": True}, {"track_running_stats": False}):
        layer = SyncBatchNorm(3, **options).eval()
        y = layer(x.mT if "channel_last" in options else x)
        found.append((y, torch.nn.functional.batch_norm(x, layer.running_mean, layer.running_var,
                      training=layer.running_mean is None), "channel_last" in options))  # fmt: skip
    return found


def under_no_grad(rank):
    """Running statistics after a training forward whose batch has the value 2 * rank."""
    layer = SyncBatchNorm(3, momentum=1.0)
    with torch.no_grad():
        layer(torch.full((2, 3), 2.0 * rank))
    return layer.running_mean, layer.running_var


def one_value_of_all(rank):
    layer = SyncBatchNorm(3)
    error = error_of(layer, torch.ones(1 - rank, 3))
    return error, layer.num_batches_tracked.item(), layer.running_var.tolist()


def grouped(rank, group_size):
    """Statistics in groups, also of a deep copy; and whose ranks a group has."""
    group = create_syncbn_process_group(group_size)
    layer = SyncBatchNorm(3, momentum=1.0)
    layer._specify_process_group(group)
    copied = copy.deepcopy(nn.Sequential(layer))[0]
    copied(torch.full((2, 3), 2.0 * rank))
    ranks = None if group is None else dist.get_process_group_ranks(group)
    untouched = layer.running_mean.tolist()
    return ranks, copied.running_mean.tolist(), copied.process_group is group, untouched


def wrong_groups(rank):
    """Errors of group sizes; and of a layer whose group is the other rank."""
    sizes = [error_of(create_syncbn_process_group, size) for size in (3, -1)]
    group = [dist.new_group([0]), dist.new_group([1])][1 - rank]
    return sizes, error_of(SyncBatchNorm(3, process_group=group), torch.ones(2, 3))


def trained(level, rank):
    """Losses of six steps, with SyncBatchNorm on two ranks, and with batch norm on one.

    The optimizer is made before the model is converted.
    """
    return [_losses(level, rank, synced) for synced in (True, False)]


def _losses(level, rank, synced):
    amp.reset()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if synced:
        convert_syncbn_model(model)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    called = DistributedDataParallel(model) if synced else model
    losses = []
    for _ in range(6):
        x, y = torch.randn(16, 6), torch.randint(4, (16,))
        if synced:
            x, y = x[8 * rank : 8 * rank + 8], y[8 * rank : 8 * rank + 8]
        loss = nn.functional.cross_entropy(called(x).float(), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        loss = loss.detach()
        if synced:
            dist.all_reduce(loss)
        losses.append(loss.item() / (2 if synced else 1))
    amp.reset()
    return losses


def compiled(rank):
    """Output, gradients and buffers of a compiled model, and of the same model as it is."""
    found = []
    for compiles in (True, False):
        model = nn.Sequential(nn.ReLU(), SyncBatchNorm(3), nn.Tanh()).double()
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(4 + rank, 3, generator=generator).double().requires_grad_()
        y = run(x)
        y.square().sum().backward()
        tensors = (y, x.grad, *(p.grad for p in model.parameters()), *model.buffers())
        found.append([tensor.detach() for tensor in tensors])
    torch.compiler.reset()
    return found
