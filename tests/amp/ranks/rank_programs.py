"""Programs that run on two ranks, each in a way of its own; started by test_ranks.py.

Each returns what is to be equal on all ranks.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from apex import amp, parallel
from tests.amp.training import copies, scaled_backward


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def _start(level, seed=0, make=lambda model: _sgd(model.parameters()), **options):
    amp.reset()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = make(model)
    options = {"loss_scale": "dynamic", "init_scale": 128.0, **options}
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def _inputs(rank, step):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * rank + step))


def _end(optimizer):
    params = copies(amp.master_params(optimizer))
    return params, amp.state_dict()["loss_scaler0"], amp.stepped(optimizer)


def _two_optimizers(level, **options):
    """Two layers, each with an optimizer of its own."""
    return _start(level, make=lambda model: [_sgd(part.parameters()) for part in model], **options)


def _all_reduce(optimizer):
    for param in amp.master_params(optimizer):
        dist.all_reduce(param.grad)


def _train(wrapper, optimizer, rank, steps):
    for step in range(steps):
        optimizer.zero_grad()
        scaled_backward(wrapper(_inputs(rank, step)).float().square().mean(), optimizer)
        optimizer.step()


def _train_twice_a_step(forward, wrapper, optimizer, rank):
    """Two passes a step, of which the second reduces the sum."""
    for step in range(3):
        optimizer.zero_grad()
        first, second = (_inputs(rank, 2 * step + n).requires_grad_() for n in range(2))
        with wrapper.no_sync():
            scaled_backward(forward(first).float().square().mean(), optimizer)
        scaled_backward(forward(second).float().square().mean(), optimizer)
        optimizer.step()
    return _end(optimizer)


class Checkpointed(nn.Module):
    """Recomputes the whole model in backward."""

    def __init__(self, model, use_reentrant):
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=self.use_reentrant)


def recomputed_under_no_sync(rank, level, use_reentrant):
    """Ranks begin differently."""
    model, optimizer = _start(level, seed=rank)
    wrapper = DistributedDataParallel(Checkpointed(model, use_reentrant))
    return _train_twice_a_step(wrapper, wrapper, optimizer, rank)


def another_forward_under_no_sync(rank, level):
    """The unwrapped model is called too, before the loss of the pass is complete."""
    model, optimizer = _start(level)
    wrapper = DistributedDataParallel(model)
    for step in range(3):
        optimizer.zero_grad()
        with wrapper.no_sync():
            loss = wrapper(_inputs(rank, 2 * step)).float().square().mean()
            scaled_backward(loss + 0.0 * model(torch.ones(1, 4)).float().sum(), optimizer)
        loss = wrapper(_inputs(rank, 2 * step + 1)).float().square().mean()
        with wrapper.no_sync():  # the first forward decides: its backward reduces
            scaled_backward(loss + 0.0 * wrapper(torch.ones(1, 4)).float().sum(), optimizer)
        assert optimizer._amp_stash.ledger.scaled is None
        optimizer.step()
    return _end(optimizer)


def a_part_is_wrapped(rank, level):
    """DistributedDataParallel around all that is trained, inside of the model."""
    amp.reset()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
    model[0] = part = DistributedDataParallel(model[0])
    return _train_twice_a_step(model, part, optimizer, rank)


def reduced_by_hand(rank, level):
    """An overflow on one rank arrives on the others after the block."""
    model, optimizer = _start(level)
    for step in range(3):
        optimizer.zero_grad()
        x = _inputs(rank, step) * (math.inf if rank == step == 1 else 1.0)
        loss = model(x).float().square().mean()
        scaled_backward(loss, optimizer, delay_overflow_check=True)
        _all_reduce(optimizer)
        optimizer.step()
        if step == 1:
            assert not amp.stepped(optimizer)
    return _end(optimizer)


def reduced_before_each_step(rank, level):
    """Two optimizers of one pass; each has its gradients reduced just before its step."""
    model, pair = _two_optimizers(level)
    taken = []
    for step in range(3):
        model.zero_grad()
        with amp.scale_loss(model(_inputs(rank, step)).float().square().mean(), pair) as scaled:
            scaled.backward()
            if rank == step == 1:
                model[1].weight.grad.fill_(math.inf)
        for optimizer in pair:
            _all_reduce(optimizer)
            optimizer.step()
            taken.append(amp.stepped(optimizer))
    assert taken == [True, True, True, False, True, True]
    return _end(pair[1])


def dropped_by_the_program(rank, level):
    """Ranks look at the norm of what was reduced by hand, and drop the batch."""
    model, optimizer = _start(level)
    for step in range(4):
        optimizer.zero_grad()
        x = _inputs(rank, step) * (math.inf if rank == 1 and step < 3 else 1.0)
        scaled_backward(model(x).float().square().mean(), optimizer)
        _all_reduce(optimizer)
        if torch.isfinite(amp.clip_grad_norm_(optimizer, 1.0)):
            optimizer.step()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 16.0
    return _end(optimizer)


def evaluated_first(rank, level, throughout):
    """Ranks begin differently; the model is evaluated on rank 0 alone, or in that mode throughout.

    The second is fine-tuning with frozen statistics.
    """
    model, optimizer = _start(level, seed=rank)
    wrapper = DistributedDataParallel(model)
    wrapper.eval()
    if not throughout:
        if rank == 0:
            wrapper(_inputs(rank, 0))
        wrapper.train()
        if rank == 0:
            with torch.no_grad():
                wrapper(_inputs(rank, 0))
    _train(wrapper, optimizer, rank, 2)
    return _end(optimizer)


def after_forwards_that_nobody_used(rank, level):
    """Forwards under no_sync() whose loss is dropped, or without gradients, delay nothing."""
    model, optimizer = _start(level)
    wrapper = DistributedDataParallel(model)
    for step in range(4):
        with wrapper.no_sync():
            wrapper(_inputs(rank, 10 + step))
            with torch.no_grad():
                wrapper(_inputs(rank, 20 + step))
        with torch.no_grad():
            wrapper(_inputs(rank, 30 + step))
        optimizer.zero_grad()
        scaled_backward(wrapper(_inputs(rank, step)).float().square().mean(), optimizer)
        ledger = optimizer._amp_stash.ledger
        assert ledger.scaled is None
        assert all(param.grad is not None for param in amp.master_params(optimizer))
        optimizer.step()
    return _end(optimizer)


def two_overflows_of_one_pass(rank, level):
    """Both optimizers of a pass find the inf that was reduced: the scale backs off once."""
    model, pair = _two_optimizers(level)
    for _ in range(4):
        model.zero_grad()
        with amp.scale_loss(model(_inputs(rank, 0)).float().square().mean(), pair) as scaled:
            scaled.backward()
            for part in model:
                part.weight.grad.fill_(math.inf)
        for optimizer in pair:
            _all_reduce(optimizer)
            optimizer.step()
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    assert scale == 8.0, scale
    return _end(pair[0])


def a_scale_loaded_on_rank_0(rank, level, wrap):
    model, optimizer = _start(level)
    if rank == 0:
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 5}})
    wrapper = (DistributedDataParallel if wrap == "torch" else parallel.DistributedDataParallel)(
        model
    )
    _train(wrapper, optimizer, rank, 2)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 1024.0, "unskipped": 7}
    return _end(optimizer)


def partly_reduced(rank, level, what):
    """The program reduces, after the block, gradients that DistributedDataParallel does not.

    A layer is "ignored", a weight is "beside" the model, or the wrapper has a "group of one".
    """
    factor, groups = nn.Parameter(torch.ones(())), [None, None]
    beside = [factor] if what == "beside" else []
    model, optimizer = _start(level, make=lambda model: _sgd([*model.parameters(), *beside]))
    if what == "ignored":
        names = ["1.weight", "1.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    elif what == "group of one":
        groups = [dist.new_group([number]) for number in range(dist.get_world_size())]
    wrapper = DistributedDataParallel(model, process_group=groups[rank])
    for step in range(3):
        optimizer.zero_grad()
        loss = factor * wrapper(_inputs(rank, step)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if rank == step == 1:
                (factor if beside else model[1].weight).grad.fill_(math.inf)
        params = list(amp.master_params(optimizer))
        for param in beside or (params[2:] if what == "ignored" else params):
            dist.all_reduce(param.grad)
        optimizer.step()
    return _end(optimizer)


def joined(rank, level):
    """Uneven inputs, which end with a broadcast of 16-bit weights."""
    model, optimizer = _start(level)
    wrapper = DistributedDataParallel(model)
    with wrapper.join():
        _train(wrapper, optimizer, rank, 2 + rank)
    return _end(optimizer)


def masters_by_hand(rank, data):
    """Ranks that step by gradients of their own, and go on from rank 0's masters after each step.

    Returns what each forward after that has computed, and the end.
    """
    model, optimizer = _start("O2")
    outputs = []
    for step in range(3):
        _train(model, optimizer, rank, 1)
        for param in amp.master_params(optimizer):
            dist.broadcast(param.data if data else param.detach(), 0)
        with torch.no_grad():
            outputs.append(model(_inputs(0, step)))
    return outputs, _end(optimizer)


def with_the_handle_of_2018(rank, reduce):
    """Two losses a step; on rank 1 the second one of step 1 overflows.

    Returns, for each step, what is to be equal on all ranks: weights, scales, whether it was taken.
    """
    amp.reset()
    handle = amp.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapper = model
    if reduce != "by hand":
        wrap = DistributedDataParallel if reduce == "torch" else parallel.DistributedDataParallel
        wrapper = wrap(model)
    optimizer = handle.wrap_optimizer(_sgd(model.parameters()), num_loss=2)
    steps = []
    for step in range(3):
        optimizer.zero_grad()
        for number in range(2):
            x = _inputs(rank, 2 * step + number)
            loss = wrapper(x).float().square().mean()
            with optimizer.scale_loss(
                loss * (math.inf if (rank, step, number) == (1, 1, 1) else 1)
            ) as scaled:
                scaled.backward()
        if reduce == "by hand":
            _all_reduce(optimizer)
        optimizer.step()
        weights = copies(model.parameters())
        scales = [e["loss_scale"] for e in amp.state_dict(optimizers=optimizer).values()]
        steps.append((weights, scales, amp.stepped(optimizer)))
    amp.reset()
    return steps


def different_num_losses(rank, level):
    """Loss scales that rank 0 sends to a rank with more of them."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(
        model, optimizer, opt_level=level, num_losses=1 + rank, loss_scale="dynamic", verbosity=0
    )
    DistributedDataParallel(model)(torch.ones(1, 4))
