"""What each of two ranks does with a model in shards, or split over both, in test_agreement.py.

By hand, or alone, one process has the whole model and all batches.
"""

import copy
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from apex import amp
from tests.amp.gradients.sequences import Scale
from tests.amp.ranks import agreement_programs as agreement
from tests.amp.ranks.agreement_programs import RANKS, SCALE, WINDOW, Step, adam, labelled, net, sgd
from tests.amp.training import copies, scale_now

# -- one model in shards ---------------------------------------------------------------------------


class Sharded(NamedTuple):
    """A training with ``fully_shard``; the shard of rank 1 overflows in a step."""

    level: str
    dtype: Any = None  # of MixedPrecisionPolicy
    passes: int = 1
    sync: bool = True  # False: gradients are reduced in the last pass only
    delay: bool = False  # every pass but the last has delay_unscale=True
    mesh: tuple = (2,)
    adam: bool = False
    clip: float = 0.0
    deferred: bool = False
    steps: int = 4


BAD = 1  # the step


def _sharded_batch(rank, step, number):
    return next(labelled(100 * rank + 10 * step + number, 1))


def _sharded_model(case):
    model = net(0)
    dtypes = {} if case.dtype is None else {"param_dtype": case.dtype}
    policy = MixedPrecisionPolicy(**dtypes, reduce_dtype=torch.float32)
    names = ("replicate", "shard")[-len(case.mesh) :]
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=names)
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = (adam if case.adam else sgd)(model.parameters())
    options = {"loss_scale": "dynamic", "init_scale": SCALE, "growth_interval": WINDOW}
    return amp.initialize(model, optimizer, opt_level=case.level, verbosity=0, **options)


def sharded(rank, case):
    """Its steps, and how many all-reduces each took."""
    amp.reset()
    model, optimizer = _sharded_model(case)
    steps, calls = [], []
    with agreement.devices(case) as spy:
        for step in range(case.steps):
            _sharded_step(case, model, optimizer, rank, step)
            whole = [param.full_tensor() for param in model.parameters()]
            steps.append(Step(copies(whole), scale_now(), amp.stepped(optimizer)))
            calls.append(spy.call_count)
            spy.reset_mock()
    return steps, calls


def _sharded_step(case, model, optimizer, rank, step):
    optimizer.zero_grad()
    for number in range(case.passes):
        is_last = number == case.passes - 1
        model.set_requires_gradient_sync(case.sync or is_last)
        x, y = _sharded_batch(rank, step, number)
        loss = F.cross_entropy(model(x).float(), y)
        with amp.scale_loss(loss, optimizer, delay_unscale=case.delay and not is_last) as scaled:
            scaled.backward()
            if (rank, step) == (1, BAD) and is_last:
                model[0].weight.grad.to_local().view(-1)[2] = math.inf
    if case.clip:
        amp.clip_grad_norm_(optimizer, case.clip)
    optimizer.step()


def sharded_by_hand(case):
    """The same in one process with the whole model: the steps."""
    model, scale, steps = net(0), Scale(SCALE, WINDOW, 1.0, 2.0**24), []
    optimizer = (adam if case.adam else sgd)(model.parameters())
    for step in range(case.steps):
        sums = [torch.zeros_like(param) for param in model.parameters()]
        for rank in RANKS:
            mine = [torch.zeros_like(param) for param in sums]
            for number in range(case.passes):
                x, y = _sharded_batch(rank, step, number)
                torch._foreach_add_(mine, _gradients_by_hand(case, model, x, y, scale.value))
            torch._foreach_add_(sums, mine)
        taken = step != BAD
        if taken:
            for param, total in zip(model.parameters(), sums, strict=True):
                param.grad = total / len(RANKS) / scale.value
            if case.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
        scale.finish_step(taken)
        steps.append(Step(copies(model.parameters()), scale.value, taken))
    return steps


def _gradients_by_hand(case, model, x, y, scale):
    """Scaled gradients in float32 of a batch."""
    model = copy.deepcopy(model)
    if case.dtype is not None:
        model, x = model.to(case.dtype), x.to(case.dtype)
    model.zero_grad()
    dtype = torch.float16 if case.level == "O1" else torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=case.level in ("O1", "O4")):
        out = model(x)
    (F.cross_entropy(out.float(), y) * scale).backward()
    return [param.grad.float() for param in model.parameters()]


def sharded_by_fsdp1(rank, group, level):
    """FSDP1, whose shards are no DTensors."""
    amp.reset()
    model = FullyShardedDataParallel(net(0), device_id=torch.device("cpu"))
    optimizer = sgd(model.parameters())
    group = agreement.groups(group, rank)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, process_group=group)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        x, y = _sharded_batch(rank, step, 0)
        with amp.scale_loss(F.cross_entropy(model(x).float(), y), optimizer) as scaled:
            scaled.backward()
            if rank == step == 1:
                next(model.parameters()).grad.view(-1)[0] = math.inf
        optimizer.step()
        found.append((amp.stepped(optimizer), scale_now()))
    return found


# -- one model in parallel -------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


PLANS = {  # the norm is no DTensor, or its gradient is a part of the sum on each rank
    "plain norm": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    },
}


class Parallel(NamedTuple):
    """A training with ``parallelize_module``; a gradient overflows on rank 1 in a step."""

    plan: str
    bad: str = "up"  # the layer
    backwards: bool = False  # the optimizer has the parameters in the opposite order
    passes: int = 1
    clip: float = 0.0
    value: float = 0.0  # to clip to
    steps: int = 3


def _parallel_training(case, model, optimizer, rank):
    """Steps, and the norm of the last one where gradients are clipped."""
    steps, norm = [], None
    options = {"loss_scale": "dynamic", "init_scale": SCALE, "growth_interval": WINDOW}
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0, **options)
    for step in range(case.steps):
        optimizer.zero_grad()
        for number in range(case.passes):
            seed = 10 * step + number
            x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed))
            if rank is not None and case.plan == "sequence":
                x = x.chunk(2, 1)[rank].contiguous()
            out = model(x)
            out = out.full_tensor() if isinstance(out, DTensor) else out
            with amp.scale_loss(out.square().mean(), optimizer) as scaled:
                scaled.backward()
                if rank in (1, None) and step == BAD:
                    grad = getattr(model, case.bad).weight.grad
                    (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[3] = math.nan
        if case.clip:
            norm = amp.clip_grad_norm_(optimizer, case.clip)
        if case.value:
            amp.clip_grad_value_(optimizer, case.value)
        optimizer.step()
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        steps.append(Step(copies(whole), scale_now(), amp.stepped(optimizer)))
    return steps, norm


def parallel(rank, case):
    """Steps and norm of two ranks, and of one process with the whole model."""
    amp.reset()
    found = []
    for where in (rank, None):
        model = Block()
        if where is not None:
            parallelize_module(model, init_device_mesh("cpu", (2,)), PLANS[case.plan])
        params = list(model.parameters())
        optimizer = sgd(params[::-1] if case.backwards else params)
        found.append(_parallel_training(case, model, optimizer, where))
    return found


def sharded_recipe(rank, page, folder):
    """Shards of a training that goes on and of one that was saved and loaded, and dtypes."""
    names = agreement.recipes(page, "FSDP2 and DTensor")
    first = agreement.recipes(page, "float16 on shards")  # its checkpoints take amp for the scaler

    def made():
        amp.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
        return names["sharded"](model, init_device_mesh("cpu", (2,)))

    def go_on(model, optimizer):
        names["train"](model, optimizer, labelled(20 + rank, 2))
        return copies(param.to_local() for param in model.parameters()), amp.state_dict()

    model, optimizer = made()
    dtypes = []
    for module in (model[0], model[1]):
        module.register_forward_pre_hook(lambda module, _: dtypes.append(module.weight.dtype))
    names["train"](model, optimizer, labelled(10 + rank, 3))
    first["save"](model, optimizer, amp, folder)
    straight_on = go_on(model, optimizer)
    model, optimizer = made()
    first["load"](model, optimizer, amp, folder)
    return straight_on, go_on(model, optimizer), dtypes[:2]
