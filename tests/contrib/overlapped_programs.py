"""What the ranks of tests/contrib/test_overlapped_gather.py run; each function is a job."""

import contextlib
import functools
import gc
import os
import sys
import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from apex.contrib.optimizers.distributed_fused_adam import (
    DistributedFusedAdam,
    _disable_pre_forward_hook,
)
from tests.contrib.overlapped_readers import RIGHT, SAID, SLOW, Model, Part, weights
from tests.ranks import COLLECTIVE, error_of


def same(one, other):
    """Whether two results are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.all(one == other))


def trained(overlap, **options):
    torch.manual_seed(0)
    model = Model()
    options = {"lr": 0.05, "bucket_cap_mb": 1e-4, **options}
    return model, DistributedFusedAdam(model.parameters(), overlap_param_sync=overlap, **options)


def stepped(model, optimizer, x):
    optimizer._is_hidden = False  # what an earlier reader has shown
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def read(names, rank):
    """What is wrong with each reader; readers of one model after the other, a step before each."""
    both = [trained(overlap) for overlap in (False, True)]
    model, optimizer = both[1]
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    wrong = {}
    for name in names:
        reader = {**RIGHT, **SLOW}[name]
        found, faults = [], []
        for one in both:
            stepped(*one, x)
            faults += [] if (len(one[1]._gathers) > 1) == (one is both[1]) else ["nothing pending"]
            found.append(reader(one[0], x, rank))
        faults += [] if same(*found) else ["read something else"]
        optimizer.param_sync()
        faults += [] if same(*(weights(m) for m, _ in both)) else ["left other weights"]
        faults += [] if {*map(type, weights(model))} == {nn.Parameter} else ["left a class"]
        wrong |= {name: faults} if faults else {}
    return wrong


def said(rank):
    """Whether each of `SAID` reads what was there before the step, and after param_sync() not."""
    (plain, waits), (model, optimizer) = (trained(overlap) for overlap in (False, True))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    found = {}
    for name, reader in SAID.items():
        stepped(plain, waits, x)
        before = reader(model, x, rank)
        stepped(model, optimizer, x)
        found[name] = [same(before, reader(model, x, rank))]
        optimizer.param_sync()
        found[name].append(same(reader(plain, x, rank), reader(model, x, rank)))
    return found


# -- the same training with torch's Adam under DistributedDataParallel -----------------------------

FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
BUFFERS = {"contiguous_grad_buffer": True, "contiguous_param_buffer": True}
REMAINDERS = {"store_params": False, "store_param_remainders": True}
#: Name -> dtype of the model, options, and how many of the three backward passes are reduced.
MATRIX = {
    "float32": (FLOAT, {}, 1),
    "every pass": (FLOAT, {}, 3),
    "L2": (FLOAT, {"adam_w_mode": False}, 1),
    "nothing stored": (FLOAT, {"store_params": False}, 1),
    "buffers": (FLOAT, BUFFERS, 1),
    "buffers, every pass": (FLOAT, BUFFERS, 3),
    "int32": (FLOAT, {"param_sync_dtype": torch.int32}, 1),
    "int64": (FLOAT, {"param_sync_dtype": torch.int64}, 1),
    "uint8": (HALF, {"param_sync_dtype": torch.uint8, **BUFFERS}, 1),
    "float16": (HALF, {}, 1),
    "bfloat16": (BFLOAT, {}, 1),
    "remainders": (BFLOAT, REMAINDERS, 1),
    "remainders, buffers": (BFLOAT, {**REMAINDERS, **BUFFERS}, 3),
}


class Sums(nn.Module):
    """A list of parameters, and modules."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(6) + 0.5) for _ in range(3)])

    def forward(self, x):
        x = sum((number + 1) * scale * x for number, scale in enumerate(self.scales))
        return self.second(self.first(x).relu())


def _groups(params):
    return [{"params": params[1::2], "lr": 0.02}, {"params": params[0::2]}]


class Masters:
    """torch's Adam on float32 copies of the weights."""

    def __init__(self, params, kind):
        self.params = params
        self.masters = [nn.Parameter(p.detach().float()) for p in params]
        self.adam = kind(_groups(self.masters), lr=0.01, weight_decay=0.1, eps=1e-3)

    def step(self):
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad, p.grad = p.grad.float(), None
        self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)


def _differences(found, wanted):
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


def against_ddp(dtype, options, reduced, rank):
    """The largest difference of outputs, gradients of inputs, and weights right after steps."""
    model, other = Sums().to(dtype), Sums().to(dtype)
    ddp = nn.parallel.DistributedDataParallel(other)
    kind = torch.optim.AdamW if options.get("adam_w_mode", True) else torch.optim.Adam
    reference = Masters(weights(other), kind)
    optimizer = DistributedFusedAdam(
        _groups(weights(model)), lr=0.01, weight_decay=0.1, eps=1e-3, bucket_cap_mb=1e-4,
        overlap_param_sync=True, **options,
    )  # fmt: skip
    found, pending = [], []
    for step in range(3):
        optimizer.zero_grad()
        for number in range(3):
            generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
            x, dy = (torch.randn(4, n, generator=generator).to(dtype) for n in (6, 3))
            accumulates = number < 3 - reduced
            both = []
            for net, no_sync in ((model, optimizer.no_sync), (ddp, ddp.no_sync)):
                mine = x.clone().requires_grad_()
                with no_sync() if accumulates else contextlib.nullcontext():
                    y = net(mine)
                    y.backward(dy)
                both.append([y, mine.grad])
            found.append(_differences(*both))
        optimizer.step()
        reference.step()
        pending.append(len(optimizer._gathers))
        found.append(_differences(weights(model), weights(other)))
    assert all(count > 1 for count in pending), pending
    return max(found)


def matrix(rank):
    return {name: against_ddp(*case, rank) for name, case in MATRIX.items()}


# -- compiled functions, and ends ------------------------------------------------------------------


class Own(nn.Parameter):
    """A parameter with a ``__torch_function__`` of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def compiled(how, rank):
    """Six steps: whether both runs are equal, how often Dynamo compiled, what was pending."""
    ends = []
    for overlap in (False, True):
        torch.compiler.reset()
        graphs, pending = [], []

        def backend(graph, _, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        compile_ = functools.partial(torch.compile, backend=backend, fullgraph=True)
        torch.manual_seed(2)
        model = Stack()
        optimizer = DistributedFusedAdam(
            model.parameters(), lr=0.1, overlap_param_sync=overlap, bucket_cap_mb=1e-4
        )
        if how == "layer":
            model.layers[1] = compile_(model.layers[1])
        elif how == "layer in place":
            model.layers[1].compile(backend=backend, fullgraph=True)
        elif how == "model in place":
            model.compile(backend=backend, fullgraph=True)
        norm = compile_(model.norm) if how == "function" else None
        found = []
        with warnings.catch_warnings():  # torch's of global hooks
            warnings.simplefilter("ignore", UserWarning)
            for step in range(6):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
                found.append(model(x))
                found[-1].square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                pending.append(len(optimizer._gathers))
                found += [norm()] if norm else []
        optimizer.param_sync()
        ends.append([*found, *weights(model)])
    return same(*ends), len(graphs), pending


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Part(), Part(), Part()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def norm(self):
        return self.layers[0].inner.weight.square().sum()


def frames_of_zero_grad(rank):
    """Python calls in ``zero_grad`` after a step: nothing on its way, and 300 parameters."""
    found = []
    for overlap in (False, True):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(150)))
        optimizer = DistributedFusedAdam(model.parameters(), overlap_param_sync=overlap)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            calls = []
            sys.setprofile(lambda _, event, __, calls=calls: calls.append(event))
            optimizer.zero_grad()
            sys.setprofile(None)
        assert bool(optimizer._gathers) == overlap
        found.append(calls.count("call"))
    return found


def ends(rank):
    """What is left by an optimizer that is deleted, by a class of the program's, by errors."""
    found = {}
    x = torch.ones(4, 6)
    model, optimizer = trained(True)
    plain, waits = trained(False)
    stepped(model, optimizer, x)
    stepped(plain, waits, x)
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    assert hooks
    del optimizer
    gc.collect()
    found["its classes"] = {*map(type, weights(model))} == {nn.Parameter}
    found["deleted"] = same(weights(model), weights(plain)) and not hooks

    model = nn.Linear(6, 3, bias=False)
    model.weight = Own(model.weight.detach())
    optimizer = DistributedFusedAdam(model.parameters(), overlap_param_sync=True)
    model(x).sum().backward()
    optimizer.step()
    found["a class of its own"] = type(model.weight) is Own and not optimizer._gathers

    model, optimizer = trained(True)
    old = model.first.weight.detach().clone()
    stepped(model, optimizer, x)
    pending = len(optimizer._gathers)
    with _disable_pre_forward_hook(model.first.weight):
        found["unwatched"] = same(model.first.weight, old)
    found["watched again"] = not same(model.first.weight, old)
    found["bucket by bucket"] = len(optimizer._gathers) == pending - 1
    with _disable_pre_forward_hook(model.first.weight):
        found["nothing to wait for"] = not same(model.first.weight, old)
    stepped(model, optimizer, x)
    made = type(model.first.weight)(torch.ones(2))
    found["made of its class"] = type(made) is nn.Parameter
    with torch._C.DisableTorchFunctionSubclass():  # as a compiled extension reads it
        y = (x @ model.first.weight.t()).sum()
    found["backward"] = error_of(y.backward)
    model.first.weight.grad = None
    stepped(model, optimizer, x)
    with torch._C.DisableTorchFunctionSubclass():
        model.first.weight.detach().zero_()
    found["written"] = [error_of(lambda: model.first.weight.sum()) for _ in range(2)]
    optimizer._gathers.clear()
    return found


def lost(store, rank, pipe):
    """A whole process: rank 1 ends in its second step; rank 0 sends what a reader raises."""
    torch.set_num_threads(1)
    store = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=COLLECTIVE)
    model, x = Stack(), torch.ones(4, 6)
    optimizer = DistributedFusedAdam(model.parameters(), overlap_param_sync=True)
    stepped(model, optimizer, x)
    model(x).square().sum().backward()
    if rank:
        optimizer._send_params = lambda: os._exit(1)
    optimizer.step()
    pipe.send([error_of(lambda: model.layers[0].inner.weight.sum()) for _ in range(2)])
    optimizer._gathers.clear()


def saved_and_killed(folder, rank):
    """Two steps; what is on its way is saved."""
    model, optimizer = trained(True)
    for step in range(2):
        stepped(model, optimizer, torch.full((4, 6), 0.1 + step + rank))
    assert optimizer._gathers
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / f"{rank}.pt")
    stepped(model, optimizer, torch.ones(4, 6))  # killed while it is pending
    return True


def restarted(folder, rank):
    """Whether training goes on as without an end."""
    plain, waits = trained(False)
    for step in range(4):
        stepped(plain, waits, torch.full((4, 6), 0.1 + step + rank))
    model, optimizer = trained(True)
    state = torch.load(folder / f"{rank}.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for step in range(2, 4):
        stepped(model, optimizer, torch.full((4, 6), 0.1 + step + rank))
    return same(weights(model), weights(plain))
