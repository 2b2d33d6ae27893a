"""More programs for two ranks: what differs between ranks, and what breaks in the middle."""

import contextlib
import functools
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from apex import amp
from apex.parallel import DistributedDataParallel, Reducer
from tests.parallel.wrapper_programs import _check, _grads, _numbers, begun


class Pair(nn.Module):
    """Two weights of one size; the second one is used or not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x, skips=False):
        total = (self.first * x).sum()
        return total if skips else total + (self.second * x).sum()


class _Sum(torch.autograd.Function):
    """Communicates in its backward, in the default group, as SyncBatchNorm does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


def two_wrappers(rank, delay):
    """In one backward pass, of equal sizes; rank 0 leaves a weight of the first unused."""
    models = Pair(), Pair()
    wrappers = [DistributedDataParallel(m, message_size=1, delay_allreduce=delay) for m in models]
    x = torch.full((4,), rank + 1.0)
    for step in range(4):
        for model in models:
            model.zero_grad()
        skips = step > 1 and rank == 0
        second = wrappers[1](10 * x)  # its backward comes after that of the other
        (wrappers[0](x, skips) + second).backward()
        half = 1.0 if step > 1 else 1.5
        _check(models[0], [torch.full((4,), 1.5), torch.full((4,), half)])
        _check(models[1], [torch.full((4,), 15.0)] * 2)
    return _grads(models[0]) + _grads(models[1])


def another_collective_in_backward(rank):
    """Of the size of a bucket; rank 0 leaves a weight unused."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.early, self.pair = nn.Parameter(torch.zeros(5)), Pair()

        def forward(self, x, skips):
            summed = _Sum.apply(self.early)  # its backward comes after those of the pair
            return (summed[:4] * x).sum() + self.pair(x, skips)

    model = Net()
    wrapper = DistributedDataParallel(model, message_size=1)
    for step in range(4):
        model.zero_grad()
        skips = step > 1 and rank == 0
        wrapper(torch.full((4,), rank + 1.0), skips).backward()
        early = torch.tensor([1.5] * 4 + [0.0])
        _check(model, [early, torch.full((4,), 1.5), torch.full((4,), 1.0 if step > 1 else 1.5)])
    return _grads(model)


def sums_of_two_heads(rank):
    """A pass leaves alone the sums that it has nothing to add to; zeroed ones count as none."""
    model = Heads(nn.Linear(1, 1, bias=False) for _ in range(2))
    wrapper = DistributedDataParallel(model, gradient_average=False)
    for set_to_none in (True, False, False):
        for head in range(2):
            wrapper(torch.ones(1, 1), head).sum().backward()
        _check(model, [torch.full((1, 1), 2.0)] * 2)
        wrapper.zero_grad(set_to_none=set_to_none)
    return [p.detach() for p in model.parameters()] + _grads(model)


class Heads(nn.ModuleList):
    """One of several layers is used at a time."""

    def forward(self, x, head):
        return self[head](x)


def sums_that_were_clipped(rank):
    layer = nn.Linear(1, 1, bias=False)
    wrapper = DistributedDataParallel(layer, gradient_average=False)
    wrapper(torch.ones(1, 1)).sum().backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    wrapper(torch.ones(1, 1)).sum().backward()


def taken_by_a_later_hook(rank):
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapper = DistributedDataParallel(layer)
    wrapper(torch.ones(1, 2)).sum().backward()
    for weight in layer.parameters():
        weight.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    wrapper(torch.ones(1, 2)).sum().backward()


def unfrozen_past_the_wrapper(rank):
    model = Pair()
    model.first.requires_grad_(False)
    wrapper = DistributedDataParallel(model)
    x = torch.full((4,), rank + 1.0)
    model(x).backward()
    model.first.requires_grad_(True)
    model.zero_grad()
    model(x).backward()
    _check(wrapper.module, [torch.full((4,), 1.5)] * 2)
    return _grads(model)


def moved_to_another_wrapper(rank):
    """A layer is taken out of a wrapped model and wrapped for itself."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    wrapper = DistributedDataParallel(model)
    wrapper(torch.ones(1, 2)).sum().backward()
    old, model[1] = model[1], nn.Linear(2, 2, bias=False)
    wrapper(torch.ones(1, 2)).sum().backward()
    old.zero_grad()
    DistributedDataParallel(old)(torch.full((1, 2), rank + 1.0)).sum().backward()
    _check(old, [torch.full((2, 2), 1.5)])
    return _grads(old)


def other_arguments(rank):
    DistributedDataParallel(Pair(), gradient_average=rank == 0)


def functional_calls(rank):
    """Fast weights pass through the wrapper; the module's own keep their hooks."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    wrapper = DistributedDataParallel(model)
    x = torch.full((1, 1), rank + 1.0)
    for fast in (model.weight * 0.9, torch.full((1, 1), 3.0, requires_grad=True)):
        model.zero_grad()
        loss = torch.func.functional_call(wrapper, {"module.weight": fast}, (x,)).sum()
        (loss + wrapper(x).sum()).backward()
        _check(model, [torch.full((1, 1), 1.5 * (1.9 if fast.grad_fn else 1.0))])
    return _grads(model)


def other_loss_scales(rank, kind, level):
    """Rank 0 alone has loaded its loss scale: all ranks have it from the first forward on."""
    amp.reset()
    torch.manual_seed(0)
    layer = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    amp.initialize(layer, optimizer, opt_level=level, verbosity=0, num_losses=2)
    if rank == 0:
        entries = [{"loss_scale": 2.0**number, "unskipped": number} for number in (3, 5)]
        amp.load_state_dict({f"loss_scaler{n}": entry for n, entry in enumerate(entries)})
    wrapper = kind(layer)
    for step in range(2):
        loss = wrapper(_numbers(rank, step, 4, 2)).float().sum()
        with amp.scale_loss(loss, optimizer, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    scales = amp.state_dict()
    assert scales["loss_scaler0"] == {"loss_scale": 8.0, "unskipped": 3}
    assert scales["loss_scaler1"] == {"loss_scale": 32.0, "unskipped": 7}
    return [layer.weight.detach()]


def grown(rank, level):
    """A layer is added after the first step; ranks have seeded it differently."""
    amp.reset()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    wrapper = DistributedDataParallel(model)
    for step in range(3):
        if step == 1:
            layer = nn.Linear(4, 4).to(model[0].weight.dtype)
            model.append(layer)
            optimizer.add_param_group({"params": list(layer.parameters())})
        optimizer.zero_grad()
        loss = wrapper(_numbers(rank, step, 4, 4)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return [p.detach() for p in (*amp.master_params(optimizer), *model.parameters())]


def reduced_by_hand(rank, level):
    """``Reducer`` after the block averages the gradients that the optimizer steps."""
    amp.reset()
    torch.manual_seed(0)
    layer = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    amp.initialize(layer, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
    reducer, before = Reducer(layer), layer.state_dict()["weight"].clone()
    for _ in range(2):  # the second pass accumulates
        with amp.scale_loss(layer(torch.full((1, 4), rank + 1.0)).sum(), optimizer) as loss:
            loss.backward()
    reducer.reduce()
    optimizer.step()
    moved = before - layer.state_dict()["weight"]
    assert torch.allclose(moved, torch.full_like(moved, 0.5 * 2 * 1.5)), moved
    return [moved]


def reducer_with_masters(rank):
    """The masters of rank 0 are sent, not only its weights."""
    model, optimizer = begun(rank, "O2")
    Reducer(model)
    return [*map(torch.clone, (*amp.master_params(optimizer), *model.parameters()))]


def buffers_of_their_own(rank):
    """Ranks keep buffers that are not even of one shape."""
    layer = nn.Linear(2, 2)
    layer.register_buffer("own", torch.full((rank + 1,), float(rank)))
    wrapper = DistributedDataParallel(layer, broadcast_buffers=False)
    for _ in range(2):
        wrapper(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert layer.own.tolist() == [float(rank)] * (rank + 1)
    return _grads(layer)


class Forwards(nn.Module):
    """Hands attributes on to the wrapper that it holds, and has a layer of its own."""

    def __init__(self, wrapper):
        super().__init__()
        self.wrapper, self.head = wrapper, nn.Linear(4, 4)

    def __getattr__(self, name):
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        return getattr(super().__getattr__("wrapper"), name)

    def forward(self, x):
        return self.head(self.wrapper(x))


def a_class_that_forwards_attributes(rank):
    """It is no wrapper: amp casts all of it."""
    amp.reset()
    model = Forwards(DistributedDataParallel(nn.Linear(4, 4)))
    assert model.require_backward_grad_sync
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(torch.ones(1, 4)).dtype == torch.float32
    return [p.detach() for p in model.wrapper.parameters()]


def one_rank_fails(rank):
    """Rank 0 skips a batch after an error, which the others cannot know: it never goes on."""
    model = Pair()
    group = dist.new_group(timeout=timedelta(seconds=5))  # what rank 1 waits in vain
    wrapper = DistributedDataParallel(model, message_size=1, process_group=group)

    def train(step):
        model.zero_grad()
        loss = wrapper(torch.full((4,), rank + 1.0))
        if (rank, step) == (0, 1):
            model.first.register_hook(_fail)
        loss.backward()

    train(0)
    for step in (1, 2, 3):
        try:
            train(step)
        except (RuntimeError, ValueError):
            continue
        raise AssertionError(f"step {step} ended as if nothing had been")
    raise RuntimeError("ended")  # so that the process group is made anew


def _fail(grad):
    raise ValueError("planned")


def several_threads(rank):
    """Gradients arrive in two threads, as from two devices, and a collective takes its time."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(8)])
    wrapper = DistributedDataParallel(model, message_size=2)
    reduction = wrapper._reduction
    calls, errors = [], []
    begin = reduction.all_reduce.begin

    def slow(flat, flags=0):
        calls.append(flags)
        time.sleep(0.01)
        return begin(flat, flags)

    def arrive(indices):
        try:
            for index in indices:
                reduction.ready(index)
        except Exception as error:  # noqa: BLE001  # threads keep their errors to themselves
            errors.append(error)

    def hook(grad):  # the others arrive, as autograd's threads would call their hooks
        reduction.begin(True)
        for weight in model[1:]:
            weight.grad = torch.full((2,), 1.0 + rank)
        threads = [
            threading.Thread(target=arrive, args=(half,)) for half in ((1, 3, 5, 7), (2, 4, 6))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    reduction.all_reduce.begin = slow
    for _ in range(3):
        model.zero_grad()
        last = model[0] * (1.0 + rank)
        last.register_hook(hook)
        last.sum().backward()
        assert not errors
        _check(model, [torch.full((2,), 1.5)] * 8)
    assert len(calls) == 3 * 8
    return _grads(model)


def in_a_group_of_three(rank):
    """Rank 0 trains alone; what the first of the others loads arrives on the others."""
    amp.reset()
    groups = [dist.new_group([0]), dist.new_group([1, 2, 3])]
    torch.manual_seed(rank)
    model = Pair()
    nn.init.normal_(model.first)
    wrapper = DistributedDataParallel(model, process_group=groups[rank > 0], message_size=1)
    wrapper(torch.full((4,), rank + 1.0)).backward()
    _check(model, [torch.full((4,), 2.0 + 1.0 if rank else 1.0)] * 2)  # (2 + 3 + 4) / 3
    return [model.first.detach(), *_grads(model)]


PROGRAMS = [
    functools.partial(two_wrappers, delay=False),
    functools.partial(two_wrappers, delay=True),
    another_collective_in_backward,
    sums_of_two_heads,
    unfrozen_past_the_wrapper,
    moved_to_another_wrapper,
    functional_calls,
    *[
        functools.partial(other_loss_scales, kind=kind, level=level)
        for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel)
        for level in ("O1", "O2")
    ],
    *[functools.partial(grown, level=level) for level in ("O0", "O2")],
    *[functools.partial(reduced_by_hand, level=level) for level in ("O1", "O2")],
    reducer_with_masters,
    buffers_of_their_own,
    a_class_that_forwards_attributes,
    several_threads,
]
