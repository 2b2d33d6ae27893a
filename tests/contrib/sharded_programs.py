"""What the ranks of tests/contrib/test_distributed_optimizers.py run; each function is a job."""

import contextlib
import functools
import os
import re
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from apex import amp
from apex.amp import GradScaler
from apex.commands.selftest.gpu import waits_refused
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex.ops.lists import collectives
from apex.ops.updates.adam import Adam, adam_
from apex.optimizers import FusedAdam, FusedLAMB
from tests.checkpoints import assert_equal
from tests.ranks import COLLECTIVE, error_of

SHAPES = ((5, 3), (7,), (130, 9), (1,), (33, 2))
STEPS = 3
SMALL = {"bucket_cap_mb": 1e-4}  # three buckets
LEFT_OUT = ((), (3, 4))
GROUPS = ({"weight_decay": 0.1}, {"lr": 3e-3, "betas": (0.8, 0.99)})
FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
MIXED = (FLOAT, BFLOAT, HALF)
LAMB = functools.partial(FusedLAMB, eps=1e-8, weight_decay=0.0, max_grad_norm=0.0)


# -- one training: on ranks, and in one process with the mean gradients ----------------------------


def params(dtypes=(FLOAT,)):
    """Parameters, the same on every rank and in every process."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(x.to(dtypes[i % len(dtypes)])) for i, x in enumerate(made)]


def grads(number, rank, ps, without=()):
    """The gradient of each parameter: quarters, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    made = [torch.randint(-40, 41, p.shape, generator=generator) / 4 for p in ps]
    pairs = enumerate(zip(made, ps, strict=True))
    return [None if i in without else g.to(p.dtype) for i, (g, p) in pairs]


def backward(ps, gs):
    """A backward pass that gives these gradients."""
    terms = [(p * g).sum().float() for p, g in zip(ps, gs, strict=True) if g is not None]
    if terms:
        sum(terms).backward()


def groups(ps):
    return [{"params": ps[:2], **GROUPS[0]}, {"params": ps[2:], **GROUPS[1]}]


def alone(ranks, dtypes=(FLOAT,), make=FusedAdam, without=None, passes=1, more=0):
    """One process with the mean gradients and float32 masters.

    ``more`` steps at the end have the gradients of rank 0 alone.
    """
    ps = params(dtypes)
    stepped = [nn.Parameter(p.detach().float()) for p in ps]
    optimizer = make(groups(stepped))
    for step in range(STEPS):
        here = 1 if step >= STEPS - more else ranks
        every = [
            grads(passes * step + number, rank, ps, without[rank] if without else ())
            for rank in range(here)
            for number in range(passes)
        ]
        for i, p in enumerate(stepped):
            found = [gs[i].float() for gs in every if gs[i] is not None]
            p.grad = sum(found) / here if found else None
        optimizer.step()
    return [s.detach().to(p.dtype) for s, p in zip(stepped, ps, strict=True)]


@functools.cache
def pairs(everybody):
    return dist.new_group([0, 1]), dist.new_group([2, 3])


@functools.cache
def singles(everybody):
    return [dist.new_group([number]) for number in range(4)]


def pair(rank):
    """The process group of ranks 0 and 1, or 2 and 3: two worlds that run the same jobs."""
    return pairs(dist.group.WORLD)[rank // 2]


def world(rank, ranks):
    """The process group of 1, 2 or 4 ranks, and the rank in it."""
    if ranks == 1:
        return singles(dist.group.WORLD)[rank], 0
    return (pair(rank), rank % 2) if ranks == 2 else (dist.group.WORLD, rank)


def train(optimizer, ps, rank, without=None, steps=range(STEPS)):
    for step in steps:
        optimizer.param_sync()  # no module waits for the parameters
        backward(ps, grads(step, rank, ps, without[rank] if without else ()))
        assert all(p.grad is None for p in ps)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in ps]


def sharded(options, ranks, rank, dtypes=(FLOAT,), without=None):
    group, rank = world(rank, ranks)
    ps = params(dtypes)
    if rank:
        ps[0].data.zero_()  # rank 0's are sent
    optimizer = DistributedFusedAdam(groups(ps), process_group=group, **options)
    train(optimizer, ps, rank, without)
    optimizer.param_sync()
    return [p.detach() for p in ps]


def without_shards(rank):
    """A backend that reduces and gathers whole tensors alone."""
    collectives.WITHOUT_SHARDS.add("gloo")
    try:
        return sharded({}, 4, rank)
    finally:
        collectives.WITHOUT_SHARDS.discard("gloo")


def rounded(dtypes, options, rank):
    """Weights after three steps, and what constructing the optimizer warned of."""
    group, rank = world(rank, 2)
    ps = params(dtypes)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer = DistributedFusedAdam(groups(ps), process_group=group, **options)
        texts = [str(one.message) for one in said]
        train(optimizer, ps, rank)
    optimizer.param_sync()
    return [p.detach() for p in ps], texts


def filled(caps, rank):
    """What the first steps with buckets of these sizes warn of."""
    found = []
    for cap in caps:
        param = nn.Parameter(torch.ones(2**15))  # 1/8 MiB
        optimizer = DistributedFusedAdam([param], **({} if cap is None else {"bucket_cap_mb": cap}))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                param.sum().backward()
                optimizer.step()
        found.append([str(one.message) for one in said])
    return found


def train_gently(optimizer, ps, rank, steps=range(STEPS)):
    """Gradients around 1e-6, whose squares float16 does not have."""
    for step in steps:
        backward([p.float() for p in ps], [g.float() * 2.0**-20 for g in grads(step, rank, ps)])
        optimizer.step()


def scaled_moments(rank):
    """Weights and second moments: float32 ones, float16 ones with a scale; and what is stored."""
    group, rank = world(rank, 2)
    ends, moments = [], []
    for options in ({}, {"dtype": HALF, "grad_sync_dtype": FLOAT, "with_scaled_states": True}):
        ps = params((HALF,))
        optimizer = DistributedFusedAdam(ps, process_group=group, lr=0.01, eps=1e-12, **options)
        train_gently(optimizer, ps, rank)
        ends.append([p.detach().float() for p in ps])
        moments.append([optimizer.state_dict()["state"][n]["exp_avg_sq"] for n in range(5)])
    states = optimizer._shard.state.values()
    stored = {state[slot].dtype for state in states for slot in ("exp_avg", "exp_avg_sq")}
    return ends, moments, stored


def scaled_and_resumed(form, rank):
    """Whether float16 moments with scales go on after saving and loading as without it."""
    group, rank = world(rank, 2)
    options = {"dtype": HALF, "grad_sync_dtype": FLOAT, "with_scaled_states": True, "eps": 1e-12}
    options |= {"process_group": group}
    whole, saved_, loaded = params(), params(), params()
    train_gently(DistributedFusedAdam(whole, **options), whole, rank)
    optimizer = DistributedFusedAdam(saved_, **options)
    train_gently(optimizer, saved_, rank, steps=range(2))
    state = optimizer.state_dict(state_dict_format=form)
    optimizer = DistributedFusedAdam(loaded, **options)
    with torch.no_grad():
        torch._foreach_copy_(loaded, saved_)
    optimizer.load_state_dict(state)
    train_gently(optimizer, loaded, rank, steps=range(2, 3))
    return [*map(torch.equal, loaded, whole)]


def lamb_in_stages(rank):
    """The original's two calls before the first step."""
    ps = params()
    optimizer = DistributedFusedLAMB(groups(ps))
    optimizer._lazy_init_stage1()
    optimizer._lazy_init_stage2()
    assert len(optimizer._places) == len(ps)
    return train(optimizer, ps, rank)


def tiny(make, rank):
    """One number: three of four ranks have nothing of it."""
    p = nn.Parameter(torch.ones(()))
    optimizer = make([p], lr=0.1)
    for _ in range(2):
        (p * (rank + 1.0)).backward()
        optimizer.step()
    return [p.detach()], optimizer.state_dict()["param_groups"][0]["step"]


def of_lamb(options, rank, dtypes=(FLOAT,)):
    ps = params(dtypes)
    optimizer = DistributedFusedLAMB(groups(ps), **options)
    return train(optimizer, ps, rank)


def redundant(rank):
    """Shards over the two ranks of a pair, equal shards on the other pair."""
    ps = params()
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    optimizer = DistributedFusedAdam(
        groups(ps), distributed_process_group=pair(rank), redundant_process_group=copies
    )
    return train(optimizer, ps, rank), optimizer.grad_norm().item()


def narrow_state(rank):
    """State in bfloat16 on two ranks, and the update by hand."""
    group, rank = world(rank, 2)
    ps, mine = params((BFLOAT,)), params((BFLOAT,))
    optimizer = DistributedFusedAdam(ps, process_group=group, dtype=BFLOAT, lr=0.1)
    states = [[torch.zeros_like(p.detach()) for p in mine] for _ in range(2)]
    for step in range(STEPS):
        backward(ps, grads(step, rank, ps))
        optimizer.step()
        both = zip(grads(step, 0, mine), grads(step, 1, mine), strict=True)
        mean = [(a / 2 + b / 2) for a, b in both]
        numbers = Adam(0.1, 0.9, 0.999, 1e-8, 0.0, True, True, step + 1)
        adam_([mean, [p.detach() for p in mine], *states], numbers)
    return all(map(torch.equal, ps, mine))


# -- gradients -------------------------------------------------------------------------------------


def accumulation(how, rank):
    """Two backward passes for a step."""
    ps = params()
    optimizer = DistributedFusedAdam(groups(ps), contiguous_grad_buffer="buffer" in how)
    for step in range(STEPS):
        if how in ("no_sync", "greedy", "buffer"):
            with optimizer.no_sync(greedy_grad_copy=how != "no_sync"):
                backward(ps, grads(2 * step, rank, ps))
        else:
            backward(ps, grads(2 * step, rank, ps))
        if how.startswith("last"):
            with optimizer.no_sync(greedy_grad_copy=how == "last, greedy"):
                backward(ps, grads(2 * step + 1, rank, ps))
        else:
            backward(ps, grads(2 * step + 1, rank, ps))
        optimizer.step()
    return [p.detach() for p in ps]


def between(options, rank):
    """Passes that are reduced, a gradient that one rank misses, other collectives in between."""
    group, rank = world(rank, 2)
    ps = params()
    optimizer = DistributedFusedAdam(groups(ps), process_group=group, **SMALL, **options)
    for step in range(STEPS):
        for number in range(2):
            backward(ps, grads(2 * step + number, rank, ps, LEFT_OUT[rank]))
            dist.all_reduce(torch.ones(3), group=group)  # say, of a loss
        optimizer.step()
    return [p.detach() for p in ps]


def dropped(rank):
    """A batch without a step, in which ranks have sent other buckets by themselves."""
    ps = params()
    optimizer = DistributedFusedAdam(groups(ps), bucket_cap_mb=1e-4)
    for step in range(STEPS):
        if step == 1:
            backward(ps, grads(50, rank, ps, () if rank else (4,)))
            optimizer.zero_grad()
        train(optimizer, ps, rank, steps=range(step, step + 1))
    return [p.detach() for p in ps]


def added(ranks, when, rank):
    """A group that is added in the second step, whose gradients some ranks have, and the last."""
    both = [nn.Parameter(torch.linspace(1.0, 2.0, n)) for n in (40, 5)]
    alone = [nn.Parameter(p.detach().clone()) for p in both]
    optimizer, one = DistributedFusedAdam(both[:1], lr=0.1), FusedAdam(alone[:1], lr=0.1)

    def add(now):
        if step == 1 and now:
            optimizer.add_param_group({"params": both[1:]})
            one.add_param_group({"params": alone[1:]})

    for step in range(3):
        add(when != "after the backward")
        if step == 1 and when == "and loaded":
            optimizer.load_state_dict(optimizer.state_dict())
        having = [range(4), ranks if step else ()]
        for p, other, some in zip(both, alone, having, strict=True):
            if rank in some:
                (p * (rank + 1.0) * (step - 1.5)).sum().backward()
            mean = sum(number + 1.0 for number in some) / 4 * (step - 1.5)
            other.grad = torch.full_like(other, mean) if len(some) else None
        add(when == "after the backward")
        optimizer.step()
        one.step()
    return [p.detach() for p in both], [p.detach() for p in alone]


def buffers(rank):
    """Gradients written into the buffer by the program, and parameters in buffers."""
    ps = params()
    optimizer = DistributedFusedAdam(
        groups(ps), contiguous_grad_buffer=True, contiguous_param_buffer=True, bucket_cap_mb=1e-4
    )
    optimizer.init_params_bucket(ps[:2])  # of 22 elements: as it would be without this
    optimizer.init_params()
    optimizer.init_param_buffer()
    assert [*map(id, optimizer.parameters())] == [*map(id, ps)]
    assert optimizer.parameter(1, 2) is ps[4]
    views = [optimizer.grad_buffer_view(p) for p in ps]
    for step in range(STEPS):
        for view, grad in zip(views, grads(step, rank, ps), strict=True):
            view.add_(grad)
        if step == 1:  # also as param.grad
            for p, view in zip(ps, views, strict=True):
                p.grad = view
        optimizer.step()
        assert not any(view.any() for view in views)
    return [p.detach() for p in ps], len({p.untyped_storage().data_ptr() for p in ps})


def bytes_sent(rank):
    """What one step sends, and what the padded buckets say."""
    sent = []

    def counted(name):
        function = getattr(dist, name)

        def call(*args, **kwargs):
            sent.append((name, sum(x.nbytes for x in args if isinstance(x, torch.Tensor))))
            return function(*args, **kwargs)

        return function, call

    ps = params((FLOAT, BFLOAT))
    optimizer = DistributedFusedAdam(ps, grad_sync_dtype=FLOAT)
    names = (collectives.REDUCE_SCATTER, collectives.ALL_GATHER, "all_reduce")
    kept = {name: counted(name) for name in names}
    for name, (_, call) in kept.items():
        setattr(dist, name, call)
    try:
        train(optimizer, ps, rank, steps=range(1))
    finally:
        for name, (function, _) in kept.items():
            setattr(dist, name, function)
    return sent


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.second(self.first(x).relu()) + x)


class Attends(nn.Module):
    """Reads parameters of a module that it does not call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.MultiheadAttention(6, 1)

    def forward(self, x):
        return self.inner(x, x, x)[0]


def attention(compiled, rank):
    """overlap_param_sync with nn.MultiheadAttention, also in a compiled model or function."""
    found = []
    for overlap in (False, True):
        model = Attends()
        optimizer = DistributedFusedAdam(
            model.parameters(), lr=0.1, overlap_param_sync=overlap, bucket_cap_mb=1e-4
        )
        graphs = []

        def backend(graph, _, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        call = model if compiled != "function" else lambda x, model=model: model(x)
        call = torch.compile(call, backend=backend, fullgraph=True) if compiled else call
        with warnings.catch_warnings():  # torch's of global hooks
            warnings.simplefilter("ignore", UserWarning)
            for step in range(STEPS):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
                if compiled == "function":
                    optimizer.param_sync()
                call(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.param_sync()
        assert len(graphs) <= {"": 0, "model": 1, "function": 2}[compiled]  # with hooks, without
        found.append([p.detach() for p in model.parameters()])
    return all(map(torch.equal, *found))


# -- scaling ---------------------------------------------------------------------------------------


def scaled(kind, rank):
    """Four steps, an inf on rank 1 in the second; scales, and weights after the first three."""
    ps = params((HALF,))
    make = DistributedFusedLAMB if kind == "lamb" else DistributedFusedAdam
    optimizer = make(groups(ps))
    apexs = kind in ("apex", "unscale", "left")
    scaler = GradScaler("cpu", 4.0) if apexs else torch.amp.GradScaler("cpu", 4.0)
    seen = []
    for step in range(4):
        if kind == "lamb":
            optimizer.set_global_scale(scaler._get_scale_async() if step else 4.0)
        gs = grads(step, rank, ps)
        if step == 1 and rank == 1:
            gs[2][3, 3] = float("inf")
        terms = [(p.float() * g).sum() for p, g in zip(ps, gs, strict=True)]
        with optimizer.no_sync() if kind == "left" else contextlib.nullcontext():
            scaler.scale(sum(terms)).backward()
        if kind == "lamb":
            optimizer.complete_reductions()
        if kind == "unscale":
            scaler.unscale_(optimizer)
            norm = optimizer.clip_grad_norm(1e9)
            assert torch.isfinite(norm) == (step != 1)
        before = ps[2].detach().clone()
        with warnings.catch_warnings():  # torch's scaler will not pass itself to step for ever
            warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself")
            scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), torch.equal(before, ps[2].detach())))
    return seen, [p.detach() for p in ps]


def scaler_of_more_ranks(how, rank):
    """Two optimizers of two ranks each, a scaler for all, an inf on rank 0; was a step taken?"""
    param = nn.Parameter(torch.ones(9))
    optimizer = DistributedFusedAdam([param], lr=0.5, process_group=pair(rank))
    scaler = GradScaler("cpu", 4.0, process_group=dist.group.WORLD)
    scaler.scale((param * (torch.inf if rank == 0 else 1.0)).sum()).backward()
    if how == "told":
        optimizer.unscale_grads(grad_scaler=scaler)
    elif how == "unscale":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), param[0].item()


def global_scale(how, rank):
    """LAMB with a scale of its own and a scaler: the norm of four gradients of 1."""
    param = nn.Parameter(torch.ones(4))
    optimizer = DistributedFusedLAMB([param])
    optimizer.set_global_scale(8.0)
    scaler = GradScaler("cpu", 1024.0)
    scaler.scale(torch.zeros(()))
    (8.0 * param).sum().backward()
    if how == "told":
        optimizer.unscale_grads(grad_scaler=scaler)
    else:
        scaler.unscale_(optimizer)
    return optimizer.grad_norm().item()


def one_rank(device, folder):
    """One process of its own: FusedAdam's bits, and on a GPU the host waits for no flag."""
    for options, dtypes in (({}, MIXED), (REMAINDERS, (BFLOAT,)), ({"capturable": True}, MIXED)):
        ps = [nn.Parameter(p.detach().to(device)) for p in params(dtypes)]
        stepped = [nn.Parameter(p.detach().float()) for p in ps]
        capturable = options.get("capturable", False)
        optimizer = DistributedFusedAdam(ps, **options)
        other = FusedAdam(stepped, capturable=capturable)
        for step in range(STEPS):
            for p, q, grad in zip(ps, stepped, grads(step, 0, ps), strict=True):
                p.grad = grad.to(device)
                q.grad = p.grad.float()
            optimizer.step()
            other.step()
        assert all(torch.equal(p, q.to(p.dtype)) for p, q in zip(ps, stepped, strict=True))
    state = optimizer.state_dict()
    checkpoint.save({"optimizer": state}, checkpoint_id=folder)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    loaded = {"optimizer": optimizer.state_dict()}
    checkpoint.load(loaded, checkpoint_id=folder)
    assert loaded["optimizer"]["param_groups"][0]["step"] == STEPS
    assert_equal(loaded["optimizer"]["state"], state["state"])
    ps = [nn.Parameter(p.detach().to(device)) for p in params((HALF,))]
    optimizer, scaler = DistributedFusedAdam(ps), GradScaler(device, 4.0)
    for _ in range(2):
        scaler.scale(sum(p.float().square().sum() for p in ps)).backward()
        optimizer.grad_sync()
        with waits_refused() if device == "cuda" else contextlib.nullcontext():
            scaler.step(optimizer)
        scaler.update()
    with warnings.catch_warnings():  # torch's, of a parameter that is twice in a group
        warnings.simplefilter("ignore", UserWarning)
        assert [*DistributedFusedAdam(ps[:1] * 2).parameters()] == ps[:1]


def recipe(page, rank):
    """The program of the page: steps taken and skipped, the scale, and the weights."""
    _, _, section = page.read_text().partition("\n## Apex's sharded optimizers\n")
    code, names = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], {}
    exec(compile(code, str(page), "exec"), names)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(64, 8, generator=generator).half() for _ in range(30)]
    batches = [(x, x.argmax(1) % 4) for x in inputs]
    optimizer, scaler = names["train"](model, batches, "cpu")
    _, taken, skipped, scale = scaler.outcome(optimizer).numbers()
    return taken, skipped, scale, [p.detach() for p in model.parameters()]


def clipping(rank):
    """Norms and clipping: of all, and of some."""
    group, rank = world(rank, 2)
    found = []
    for some in (False, True):
        ps = params()
        optimizer = DistributedFusedAdam(ps, process_group=group, lr=0.1)
        backward(ps, grads(0, rank, ps))
        if not some:
            optimizer.unscale_grads(inv_scale=torch.tensor(0.5))
        chosen = ps[2:] if some else None
        norms = [optimizer.grad_norm(chosen), optimizer.clip_grad_norm(1.0, chosen)]
        norms += [optimizer.grad_norm(chosen), optimizer.grad_norm(ps[:2], force=True)]
        optimizer.step()
        found.append(([norm.item() for norm in norms], [p.detach() for p in ps]))
    return found


# -- state -----------------------------------------------------------------------------------------

REMAINDERS = {"store_params": False, "store_param_remainders": True}


def saved(options, dtypes, ranks, form, rank):
    """Train two steps; the weights and the state."""
    group, rank = world(rank, ranks)
    ps = params(dtypes)
    optimizer = DistributedFusedAdam(groups(ps), process_group=group, **options)
    train(optimizer, ps, rank, steps=range(2))
    state = optimizer.state_dict(state_dict_format=form)
    return [p.detach() for p in ps], state


def resumed(options, dtypes, ranks, weights, state, first, rank):
    """Load a state, before the weights or afterwards, and train one more step."""
    group, rank = world(rank, ranks)
    ps = params(dtypes)
    optimizer = DistributedFusedAdam(groups(ps), process_group=group, **options)
    state = state[rank] if isinstance(state, list) else state
    if first == "weights":  # the original's groups have no steps
        state["state"]["step"] = max(group.pop("step") for group in state["param_groups"])
    if first == "state":
        optimizer.load_state_dict(state)
    with torch.no_grad():
        torch._foreach_copy_(ps, weights)
    if first == "weights":
        optimizer.load_state_dict(state)
    again = optimizer.state_dict(state_dict_format=state["format"])
    assert [group["step"] for group in again["param_groups"]] == [2, 2]
    train(optimizer, ps, 0, steps=range(2, 3))  # the same gradients on all ranks
    return [p.detach() for p in ps], again


def distributed_checkpoint(options, dtypes, folder, before, after, rank):
    """Save by names after two steps on some ranks; the weights after one more on others."""
    (group, rank), whole = world(rank, before), rank
    ps, folder = params(dtypes), folder / str(whole // before)
    optimizer = DistributedFusedAdam(groups(ps), process_group=group, **options)
    train(optimizer, ps, rank, steps=range(2))
    state = get_optimizer_state_dict(nn.ParameterList(ps), optimizer)
    checkpoint.save(state, checkpoint_id=folder, process_group=group)
    dist.barrier()
    group, rank = world(whole, after)
    fresh = params(dtypes)
    optimizer = DistributedFusedAdam(groups(fresh), process_group=group, **options)
    model = nn.ParameterList(fresh)
    state = get_optimizer_state_dict(model, optimizer)
    assert "step" not in optimizer.param_groups[0]  # torch took none
    checkpoint.load(state, checkpoint_id=folder, process_group=group)
    set_optimizer_state_dict(model, optimizer, state)
    with torch.no_grad():
        torch._foreach_copy_(fresh, ps)
    return train(optimizer, fresh, 0, steps=range(2, 3))  # the same gradients on all ranks


def written(options, dtypes, rank):
    """Weights that the program writes after two steps are those that are stepped."""
    group, rank = world(rank, 2)
    ps, fresh = params(dtypes), params(dtypes)
    optimizer = DistributedFusedAdam(ps, process_group=group, lr=0.0, weight_decay=1.0, **options)
    train(optimizer, ps, rank, steps=range(2))
    optimizer.param_sync()
    with torch.no_grad():
        torch._foreach_mul_(ps, 2.0)
    train(optimizer, ps, rank, steps=range(2, 3))  # lr 0: nothing but the rounding of masters
    return [torch.equal(p, 2 * f) for p, f in zip(ps, fresh, strict=True)]


# -- errors ----------------------------------------------------------------------------------------


def refused(rank):
    """Errors, by name; nothing else happens."""
    ps, make = params(), DistributedFusedAdam
    before = [p.detach().clone() for p in ps]
    half = params((BFLOAT,))
    texts, other = {}, pairs(dist.group.WORLD)[1 - rank // 2]
    wrong = {
        "amsgrad": {"amsgrad": True},
        "scaled states": {"with_scaled_states": True},
        "nccl_ub": {"nccl_ub": True},
        "both stored": {"store_param_remainders": True},
        "remainders": REMAINDERS,
        "buffer": {"contiguous_param_buffer": True, "param_sync_dtype": HALF},
        "dtype": {"dtype": torch.int32},
        "cap": {"bucket_cap_mb": 0},
        "pipeline": {"pipeline_size": "2"},
        "lr": {"lr": -1.0},
        "not in group": {"process_group": other},
        "sizes": {"distributed_process_group": pair(rank)},
    }
    for name, options in wrong.items():
        texts[name] = error_of(lambda options=options: make(ps, **options))
    texts["meta"] = error_of(lambda: make([ps[0], nn.Parameter(torch.ones(2, device="meta"))]))
    texts["ranks differ"] = error_of(lambda: make([nn.Parameter(torch.ones(2 + rank))]))
    texts["options differ"] = error_of(lambda: make(ps, bucket_cap_mb=2 + rank))
    lamb = {
        "tuning": {"dwu_num_chunks": 4.0}, "gather": {"skip_allgather": True},
        "e5m2": {"e5m2_allgather": True}, "clip": {"clip_after_ar": False},
    }  # fmt: skip
    for name, options in lamb.items():
        texts[name] = error_of(lambda options=options: DistributedFusedLAMB(ps, **options))
    assert all(map(torch.equal, ps, before))
    assert not any(p._post_accumulate_grad_hooks for p in ps)
    optimizer = make(ps)
    texts["view"] = error_of(lambda: optimizer.grad_buffer_view(ps[0]))
    texts["param buffer"] = error_of(optimizer.init_param_buffer)
    texts["stranger"] = error_of(lambda: optimizer.init_params(half))
    texts["norm type"] = error_of(lambda: optimizer.grad_norm(norm_type=1.0))
    texts["copy"] = error_of(optimizer.__getstate__)
    texts["old arguments"] = error_of(lambda: optimizer.step(None, 3.0))
    backward(ps, grads(0, rank, ps))
    texts["amp"] = error_of(lambda: amp.initialize(MLP(), optimizer, opt_level="O5", verbosity=0))
    texts["no scale"] = error_of(optimizer.unscale_grads)
    optimizer.clip_grad_norm(1.0)
    texts["twice"] = error_of(lambda: optimizer.unscale_grads(inv_scale=1.0))
    texts["late gradient"] = error_of(lambda: backward(ps, grads(1, rank, ps)))
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((ps[0] * 1.0).sum()).backward()
    scaler.unscale_(optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself")
        texts["torch's unscale_"] = error_of(lambda: scaler.step(optimizer))
    optimizer.zero_grad()
    kept, ps[1].data = ps[1].data, torch.zeros(8)
    texts["moved"] = error_of(optimizer.step)
    ps[1].data = kept
    second = make(ps)
    texts["two optimizers"] = error_of(lambda: backward(ps, grads(1, rank, ps)))
    for one in (optimizer, second):
        one._forget()
        one._sent.clear()
    return texts


def bad_states(rank):
    """Errors of load_state_dict."""
    group, _ = world(rank, 2)
    ps = params()
    optimizer = DistributedFusedAdam(groups(ps), process_group=group)
    train(optimizer, ps, rank % 2, steps=range(1))
    whole, part = optimizer.state_dict(), optimizer.state_dict(state_dict_format=1)
    rooted = optimizer.state_dict(gather_on_root=True)
    four = DistributedFusedAdam(groups(ps))
    more = DistributedFusedAdam(params()[:4])
    texts = {
        "format": error_of(lambda: optimizer.load_state_dict({"format": 3, "state": {}})),
        "nothing": error_of(lambda: optimizer.load_state_dict({})),
        "ranks": error_of(lambda: four.load_state_dict(part)),
        "not root": error_of(lambda: optimizer.load_state_dict(rooted)),
        "groups": error_of(lambda: more.load_state_dict(whole)),
        "what": error_of(lambda: optimizer.state_dict(state_dict_format=1, gather_on_root=True)),
    }
    whole["state"][2]["exp_avg"] = torch.zeros(3)
    texts["shape"] = error_of(lambda: optimizer.load_state_dict(whole))
    kept = optimizer.state_dict(state_dict_format=1)["state"]
    assert_equal(part["state"], kept)
    return texts


def killed(store, rank, pipe):
    """A whole process: rank 1 ends before its second step; rank 0 sends what it sees."""
    torch.set_num_threads(1)
    store = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=COLLECTIVE)
    ps = params()
    optimizer = DistributedFusedAdam(ps)
    train(optimizer, ps, rank, steps=range(1))
    if rank:
        os._exit(1)
    pipe.send(error_of(lambda: train(optimizer, ps, rank, steps=range(1, 2))))
