"""What each of four ranks does in :mod:`tests.optimizers.test_shards`."""

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from apex.contrib import optimizers as contrib
from apex.contrib.clip_grad import clip_grad_norm_
from apex.ops.lists.clip import clip_
from apex.optimizers import (
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedMuon,
    FusedNovoGrad,
    FusedSGD,
)
from apex.parallel import LARC
from tests.optimizers.common import EVERY, in_two_groups, normal, on
from tests.optimizers.test_every_optimizer import lagging_device
from tests.ranks import error_of

WITH_NORMS = {  # how many norms of a step depend on each other, and how it is made
    "FusedLAMB": (2, EVERY["FusedLAMB"]),  # of all gradients for clipping, of each tensor
    "not clipped": (1, lambda params: FusedLAMB(params, lr=0.02, max_grad_norm=0.0)),
    "FusedMixedPrecisionLamb": (2, lambda params: FusedMixedPrecisionLamb(params, lr=0.02)),
    "FusedNovoGrad": (1, EVERY["FusedNovoGrad"]),
    "largest": (1, lambda params: FusedNovoGrad(params, lr=0.02, norm_type=0)),
    "LARC": (1, lambda params: LARC(FusedSGD(params, lr=0.5, weight_decay=0.1))),
    "LARC of torch": (1, lambda params: LARC(torch.optim.SGD(params, lr=0.5, momentum=0.9))),
    "clipped": (1, lambda params: FusedAdam(params, lr=0.02, max_grad_norm=0.5)),
    "contrib": (2, lambda params: contrib.FusedAdam(params, lr=0.02, max_grad_norm=0.5)),  # groups
}
# Muon, whose matrices ranks share, has programs of its own.
WITHOUT_NORMS = tuple(name for name in EVERY if name not in ("FusedMuon", *WITH_NORMS))
MAKERS = {name: EVERY[name] for name in WITHOUT_NORMS}
MAKERS["by hand"] = MAKERS["FusedAdam"]
MAKERS |= {name: make for name, (_, make) in WITH_NORMS.items()}
# Even shards, uneven ones, and some that ranks have nothing of.
SHAPES = ((8, 4), (5, 7), (1, 6), (3, 1), (9,), (2, 3, 4))
S0, S1, R = Shard(0), Shard(1), Replicate()
MESHES = {"four": [0, 1, 2, 3], "two by two": [[0, 1], [2, 3]], "two": [0, 1]}
PLACED = {  # the mesh, placements, and over how many dimensions of it tensors are sharded
    "rows": ("four", (S0,), 1),
    "columns": ("four", (S1,), 1),
    "replicated": ("four", (R,), 0),
    "HSDP": ("two by two", (R, S0), 1),
    "tensor parallel": ("two by two", (R, S1), 1),
    "rows over both": ("two by two", (S0, S0), 2),
    "rows and columns": ("two by two", (S0, S1), 2),
    "two ranks": ("two", (S0,), 1),
}


@functools.cache
def mesh(name):
    """Made by all ranks at once."""
    return DeviceMesh("cpu", MESHES[name])


def is_in(rank, case):
    """Whether the rank is in the mesh, which is made now."""
    name = None if case is None else PLACED[case][0]
    return name is None or rank in mesh(name).mesh


def spread(tensor, case):
    """A DTensor, without communication; of a vector dimension 0 stands for all."""
    name, placements, _ = PLACED[case]
    if tensor.dim() == 1:
        placements = [S0 if place == S1 else place for place in placements]
    return distribute_tensor(tensor.clone(), mesh(name), placements, src_data_rank=None)


tensors = functools.partial(normal, shapes=SHAPES)


class Both:
    """A training on shards, and the same in one process.

    ``cases`` are the placements of the tensors, taken in turn; ``None`` for no DTensor.
    """

    def __init__(self, name, *cases):
        self.cases = [cases[number % len(cases)] for number in range(len(SHAPES))]
        self.alone = [nn.Parameter(x) for x in tensors(0)]
        self.params = [nn.Parameter(x) for x in self.spread(tensors(0))]
        make = MAKERS[name]
        self.one, self.several = make(in_two_groups(self.alone)), make(in_two_groups(self.params))

    def spread(self, values):
        both = zip(values, self.cases, strict=True)
        return [x.clone() if case is None else spread(x, case) for x, case in both]

    def step(self, path, *seeds):
        """Collectives of the last step."""
        for seed in seeds:
            self.give_grads(tensors(seed))
            with on(path), CommDebugMode() as calls:
                self.several.step()
            with on(path):
                self.one.step()
        return calls.get_total_counts()

    def give_grads(self, values):
        for param, grad in zip(self.params, self.spread(values), strict=True):
            param.grad = grad
        for param, grad in zip(self.alone, values, strict=True):
            param.grad = grad

    def pairs(self):
        """Local parts of weights and states, and what they should be."""
        found = []
        states = [getattr(x, "optim", x).state for x in (self.several, self.one)]
        for param, other, case in zip(self.params, self.alone, self.cases, strict=True):
            mine, wanted = states[0][param], states[1][other]
            assert mine.keys() == wanted.keys()
            both = [(param.detach(), other.detach()), *((mine[key], wanted[key]) for key in mine)]
            for x, exact in both:
                if isinstance(x, DTensor):
                    x = x.to_local()
                    exact = spread(exact, case).to_local() if exact.dim() else exact
                found.append((torch.as_tensor(x).clone(), torch.as_tensor(exact).clone()))
        return found


def stepped(rank, name, path, cases):
    """For each placement what three steps left, what they should, and collectives of a step."""
    found = {}
    for case in cases:
        if is_in(rank, case):
            both = Both(name, case)
            found[case] = both.step(path, 1, 2, 3), both.pairs()
    return found


def mixed(rank, name):
    """The same of tensors on different meshes and of one that is no DTensor, in one optimizer."""
    both = Both(name, "rows", None, "HSDP", "rows and columns")
    return both.step(None, 1, 2, 3), both.pairs()


def skipped(rank, name):
    """What a step leaves whose flag is on a device that lags behind: 1, then 0."""
    both = Both(name, "rows")
    both.step("reference", 1, 2)
    both.give_grads(tensors(3))
    before = both.pairs()
    optimizer = getattr(both.several, "optim", both.several)
    with lagging_device():
        optimizer.step_scaled(1.0, torch.ones(()))
    after = both.pairs()
    with lagging_device():
        optimizer.step_scaled(1.0, torch.zeros(()))
        getattr(both.one, "optim", both.one).step_scaled(1.0, torch.zeros(()))
    return before, after, both.pairs()


def without_gradients(rank, name):
    """The last rank has none: weights of a step, of one process where they are 0, and before."""
    both = Both(name, "rows")
    own = [spread(x, "rows").to_local().numel() if rank == 3 else 0 for x in tensors(0)]
    sizes = torch.tensor(own)
    torch.distributed.all_reduce(sizes)
    grads = tensors(1)
    for grad, size in zip(grads, sizes.tolist(), strict=True):
        grad.view(-1)[grad.numel() - size :] = 0
    both.give_grads(grads)
    if rank == 3:
        for param in both.params:
            param.grad = None
    if name == "by hand":
        clip_grad_norm_(both.params, 0.5)
        clip_grad_norm_(both.alone, 0.5)
    both.several.step()
    both.one.step()
    found = zip(both.params, both.alone, tensors(0), strict=True)
    return [
        (param.detach().to_local(), *(spread(x.detach(), "rows").to_local() for x in others))
        for param, *others in found
    ]


def nan_on_one_rank(rank, order):
    """How many elements are nan, and norms of the gradients."""
    both = Both("largest" if order == 0 else "FusedNovoGrad", "rows")
    both.give_grads(tensors(1))
    if rank == 1:
        both.params[0].grad.to_local().view(-1)[0] = -torch.nan
    both.several.step()
    return [both.several.state[param]["norm"].to_local().item() for param in both.params[:2]]


def refused(rank):
    """Messages for norms of what cannot be added up."""
    partial = DTensor.from_local(torch.ones(3), mesh("four"), [Partial()], run_check=False)
    rows = spread(torch.ones(4, 2), "rows")
    return error_of(clip_, [partial], 1.0, 2.0), error_of(clip_, [rows], 1.0, 0.0)


# -- ZeroRedundancyOptimizer -----------------------------------------------------------------------

PARTITIONED = {
    "FusedAdam": (FusedAdam, {"max_grad_norm": 0.5}),
    "FusedLAMB": (FusedLAMB, {}),
    "FusedMixedPrecisionLamb": (FusedMixedPrecisionLamb, {}),
    "FusedNovoGrad": (FusedNovoGrad, {}),
    "FusedMuon": (FusedMuon, {}),
    "contrib": (contrib.FusedAdam, {"max_grad_norm": 0.5}),
}


def partitioned(rank, name):
    """Weights of torch's ZeroRedundancyOptimizer and of one process; two ranks have no weights.

    Each weight is a group, so the first rank has none of the second. Before the last step the state
    is gathered, and loaded into a new one.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns of torch.jit

    kind, options = PARTITIONED[name]
    shapes = SHAPES[:2]
    mine, alone = ([nn.Parameter(x) for x in tensors(0)[: len(shapes)]] for _ in range(2))
    numbers = [{"algorithm": name} if kind is FusedMuon else {} for name in ("muon", "adam")]
    its, others = (
        [{"params": [x], **own} for x, own in zip(params, numbers, strict=True)]
        for params in (mine, alone)
    )
    several, resumed = (
        ZeroRedundancyOptimizer(its, optimizer_class=kind, lr=0.02, **options) for _ in range(2)
    )
    one = kind(others, lr=0.02, **options)
    for seed in (1, 2, 3):
        if seed == 3:
            several.consolidate_state_dict()
            state = [several.state_dict() if rank == 0 else None]
            torch.distributed.broadcast_object_list(state)
            several = resumed
            several.load_state_dict(state[0])
        for params in (mine, alone):
            for param, grad in zip(params, tensors(seed), strict=False):
                param.grad = grad
        several.step()
        one.step()
    return [(x.detach(), exact.detach()) for x, exact in zip(mine, alone, strict=True)]
