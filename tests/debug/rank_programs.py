"""Programs of two ranks with a fault on one of them; each rank answers with its report."""

import functools
import pickle

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from apex import debug, parallel
from tests.debug.table import Block, Middle, square

BAD_STEP = 3


def _sharded(model, dtype=None):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in (model.first, model.last):
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "apex ddp": parallel.DistributedDataParallel,
    "fsdp": _sharded,
    "fsdp float16": functools.partial(_sharded, dtype=torch.float16),
}


class _Switch:
    """The function of a module: a fault while it is on."""

    def __init__(self, function):
        self.function, self.on = function, False

    def __call__(self, x):
        return self.function(x) if self.on else x


def root(x):
    return torch.sqrt(x - x.detach())


def train(wrapper, function, rank, *, bad_rank=1, row=None, late=False):
    """Train; the fault is in step 3, on one rank. Return the report and whether weights stayed."""
    torch.manual_seed(0)
    switch = _Switch(function)
    model = WRAPPERS[wrapper](Block(Middle(switch)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(5 + rank)
    with debug.watch(model, optimizer, on_fault="keep") as watch:
        for step in range(1, BAD_STEP + 1):
            x = torch.randn(4, 8)
            bad = step == BAD_STEP and rank == bad_rank
            switch.on = bad and row is None
            if bad and row is not None:
                x[row] = float("nan")
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        pairs = zip(model.parameters(), before, strict=True)
        stayed = all(bool((now == then).all()) for now, then in pairs)
        if late and rank != bad_rank:
            return None  # never calls explain()
        report = watch.explain()
    report.call = None
    return pickle.loads(pickle.dumps(report)), stayed


OVERFLOW = square
