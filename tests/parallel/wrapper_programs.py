"""Programs that run on every rank with apex's wrapper; started by test_distributed.py.

Weights and inputs are integers, so that sums over ranks are exact in every order. Each program
raises where something is wrong, and returns what has to be equal on all ranks.
"""

import contextlib
import copy
import functools
import io
import random
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.parallel import DistributedDataParallel
from tests.checkpoints import reloaded


def _numbers(rank, step, *shape):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(-4, 5, shape, generator=generator).float()


class Scales(nn.Module):
    """``sum(weight * x)`` for weights of many shapes and dtypes: the gradient of each is its x."""

    SHAPES = ((3,), (2, 3), (), (5, 1), (4, 2, 3, 3), (1,), (7,), (2, 2))
    DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def __init__(self, dtypes=DTYPES):
        super().__init__()
        for number, shape in enumerate(self.SHAPES):
            weight = torch.zeros(shape, dtype=dtypes[number % len(dtypes)])
            if weight.dim() == 4:
                weight = weight.to(memory_format=torch.channels_last)
            setattr(self, f"w{number}", nn.Parameter(weight))

    def forward(self, xs, used=None, late=0.0):
        total = torch.zeros((), dtype=torch.float64)
        for number, (weight, x) in enumerate(zip(self.parameters(), xs, strict=True)):
            if used is None or number in used:
                total = total + _Delay.apply(weight, late).double().mul(x.double()).sum()
        return total


class _Delay(torch.autograd.Function):
    """Returns its input; its backward sleeps for a while, so that ranks are at other places."""

    @staticmethod
    def forward(ctx, weight, seconds):
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(random.uniform(0, ctx.seconds))
        return grad, None


def _xs(rank, step):
    return [_numbers(rank, 100 * step + n, *shape) for n, shape in enumerate(Scales.SHAPES)]


def _sums(step):
    every = [_xs(rank, step) for rank in range(dist.get_world_size())]
    return [sum(column) for column in zip(*every, strict=True)]


def _check(model, wanted):
    for (name, weight), value in zip(model.named_parameters(), wanted, strict=True):
        if value is None:
            assert weight.grad is None, f"{name} has a gradient"
        else:
            assert weight.grad is not None, f"{name} has no gradient"
            assert weight.grad.dtype == weight.dtype
            assert torch.equal(weight.grad.double(), value.double()), name


def _grads(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def sums_are_exact(rank, options, trigger=False, steps=6):
    """The race: ranks sleep between gradients, and sums over ranks are those of integers."""
    model = Scales()
    options = dict(options)
    if trigger:
        options["allreduce_trigger_params"] = [model.w2, model.w5]
    wrapper = DistributedDataParallel(model, **options)
    random.seed(rank)
    factor = 1.0 if options.get("gradient_average", True) is False else 1.0 / dist.get_world_size()
    factor /= options.get("gradient_predivide_factor", 1.0) if factor == 1.0 else 1.0
    for step in range(steps):
        model.zero_grad()
        wrapper(_xs(rank, step), late=0.002 if step % 2 else 0.0).backward()
        _check(model, [total * factor for total in _sums(step)])
    if options.get("retain_allreduce_buffers"):
        buckets = wrapper.allreduce_buffers
        assert sum(b.numel() for b in buckets) == sum(p.numel() for p in model.parameters())
        storages = {bucket.untyped_storage().data_ptr() for bucket in buckets}
        assert all(p.grad.untyped_storage().data_ptr() in storages for p in model.parameters())
    return _grads(model)


def reduced_early(rank, options, early):
    """How many buckets are on their way while the last layer to get gradients waits."""
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(4)])
    wrapper = DistributedDataParallel(model, **dict(options))
    seen = []
    model[0].register_full_backward_pre_hook(
        lambda module, grad: seen.append(len(wrapper._reduction._pass.started))
    )
    for _ in range(2):
        wrapper(torch.ones(1, 2)).sum().backward()
    assert seen == [0, early], seen


def accumulates(rank, how):
    """The last forward of a step reduces the whole sum, whatever forwards ran before it."""
    model = Scales()
    wrapper = DistributedDataParallel(model, message_size=6)
    world = dist.get_world_size()
    first, second = _sums(0), _sums(1)
    for _ in range(3):
        model.zero_grad()
        if how == "no_sync":
            with wrapper.no_sync():
                wrapper(_xs(rank, 0)).backward()
            _check(model, _xs(rank, 0))
            wrapper(_xs(rank, 1)).backward()
        elif how == "disable_allreduce":
            wrapper.disable_allreduce()
            wrapper(_xs(rank, 0)).backward()
            wrapper.enable_allreduce()
            wrapper(_xs(rank, 1)).backward()
        elif how == "forward in no_sync, backward outside":
            with wrapper.no_sync():
                loss = wrapper(_xs(rank, 0))
            loss.backward()
            _check(model, [total / world for total in first])
            wrapper(_xs(rank, 1)).backward()
        elif how == "one backward of two forwards":
            (wrapper(_xs(rank, 0)) + wrapper(_xs(rank, 1))).backward()
        elif how == "one backward of two forwards, one in no_sync":
            first_loss = wrapper(_xs(rank, 0))
            with wrapper.no_sync():
                (first_loss + wrapper(_xs(rank, 1))).backward()
        elif how == "two forwards, two backwards":
            losses = wrapper(_xs(rank, 0)), wrapper(_xs(rank, 1))
            losses[0].backward()
            losses[1].backward()
        elif how == "both reduce":
            wrapper(_xs(rank, 0)).backward()
            _check(model, [total / world for total in first])
            wrapper(_xs(rank, 1)).backward()
        elif how == "past the wrapper":
            model(_xs(rank, 0)).backward()
            model(_xs(rank, 1)).backward()
        _check(model, [(a + b) / world for a, b in zip(first, second, strict=True)])
    return _grads(model)


def second_backward_of_one_forward(rank):
    model = Scales()
    wrapper = DistributedDataParallel(model)
    loss = wrapper(_xs(rank, 0))
    loss.backward(retain_graph=True)
    loss.backward()
    _check(model, [2 * total / dist.get_world_size() for total in _sums(0)])
    return _grads(model)


def derivatives_without_gradients(rank):
    """``autograd.grad`` accumulates nothing, so nothing is reduced: rank 0 may do it alone."""
    model = Scales()
    wrapper = DistributedDataParallel(model)
    if rank == 0:
        xs = [x.requires_grad_() for x in _xs(rank, 0)]
        torch.autograd.grad(wrapper(xs), xs)
    _check(model, [None] * len(Scales.SHAPES))
    wrapper(_xs(rank, 1)).backward()
    return _grads(model)


def unused_parameters(rank, options):
    """Some are used on no rank, some on one, others from step to step."""
    model = Scales()
    wrapper = DistributedDataParallel(model, **dict(options))
    plans = [
        [{0, 1, 2, 4}, {0, 1, 5}],  # gradients arrive in another order: rank 0's is taken
        [{0, 1, 2, 4}, {0, 1, 2, 4}],
        [{3, 7}, {1, 6}],
        [set(range(8)), set(range(8))],
        [{5}, {0}],
        [{0}, set(range(8))],
    ]
    for step, plan in enumerate(plans):
        model.zero_grad()
        wrapper(_xs(rank, step), used=plan[rank]).backward()
        wanted = []
        for number in range(8):
            parts = [_xs(r, step)[number] for r in range(2) if number in plan[r]]
            wanted.append(sum(parts) / 2 if parts else None)
        _check(model, wanted)
    return _grads(model)


def frozen_and_unfrozen(rank):
    """From construction on, later, again; all of them; and one that the module gets later."""
    model = Scales()
    model.w1.requires_grad_(False)
    wrapper = DistributedDataParallel(model, message_size=6)
    halves = lambda step: [total / 2 for total in _sums(step)]  # noqa: E731
    for step, frozen in enumerate([{1}, {0, 1}, set(), {2, 3, 4}, {0, 1}, {6}]):
        model.zero_grad()
        for number, weight in enumerate(model.parameters()):
            weight.requires_grad_(number not in frozen)
        wrapper(_xs(rank, step)).backward()
        wanted = [None if n in frozen else half for n, half in enumerate(halves(step))]
        _check(model, wanted)
    model.requires_grad_(False)
    model.zero_grad()
    assert not wrapper(_xs(rank, 0)).requires_grad
    model.requires_grad_(True)
    model.w0 = nn.Parameter(torch.zeros(3))
    del model.w1
    model.w1 = nn.Parameter(torch.zeros(2, 3))  # the last one now
    xs, ys = (_xs(r, 9) for r in (rank, 1 - rank))
    order = [0, *range(2, 8), 1]
    wrapper([xs[n] for n in order]).backward()
    _check(model, [(xs[n] + ys[n]) / 2 for n in order])
    return _grads(model)


def all_frozen_and_empty(rank):
    frozen = DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
    assert torch.equal(*frozen.module.weight.new_tensor([0, 0]).split(1))
    empty = DistributedDataParallel(nn.ReLU())
    x = torch.ones(1, 2, requires_grad=True)
    (frozen(x).sum() + empty(x).sum()).backward()
    return [frozen.module.weight.clone()]


def cast_between_steps(rank):
    """Torch's wrapper silently stops reducing after a cast. The rest stays exact in float32."""
    model = Scales(dtypes=(torch.float32,))
    wrapper = DistributedDataParallel(model, message_size=6)
    cast = [0, 4, 7]
    factors = [1.0 if n in cast else 1.0 + 2.0**-12 for n in range(8)]  # 13 bits
    for step, dtype in enumerate([torch.float32, torch.bfloat16, torch.float64, torch.float16]):
        model.zero_grad()
        for number, weight in enumerate(model.parameters()):
            weight.data = weight.data.to(dtype) if number in cast else weight.data
        wrapper([x * f for x, f in zip(_xs(rank, step), factors, strict=True)]).backward()
        _check(model, [total * f / 2 for total, f in zip(_sums(step), factors, strict=True)])
    return _grads(model)


def wide_communication(rank):
    """Sums beyond 65504 of float16 gradients, and one of bfloat16 that needs 9 bits."""
    for dtype, value, options in (
        (torch.float16, 40000.0, {"allreduce_always_fp32": True}),
        (torch.float16, 40000.0, {"gradient_predivide_factor": 2.0}),
        (torch.bfloat16, 129.0, {"allreduce_always_fp32": True}),
    ):
        model = nn.Linear(1, 1, bias=False).to(dtype)
        wrapper = DistributedDataParallel(model, **options)
        x = torch.full((1, 1), value if dtype is torch.float16 or rank else 127.0, dtype=dtype)
        wrapper(x).backward(torch.ones(1, 1, dtype=dtype))
        wanted = 40000.0 if dtype is torch.float16 else 128.0
        assert model.weight.grad.item() == wanted, (options, model.weight.grad)
    plain = nn.Linear(1, 1, bias=False).half()
    wrapper = DistributedDataParallel(plain)
    wrapper(torch.full((1, 1), 40000.0, dtype=torch.float16)).sum().backward()
    assert plain.weight.grad.isinf().all()  # the control


def sums_that_are_accumulated(rank, sync):
    """Without averaging, a sum over ranks must not be summed again."""
    model = Scales()
    wrapper = DistributedDataParallel(model, gradient_average=False)
    for step in range(2):
        wrapper(_xs(rank, step)).backward()
        _check(model, _sums(step))
        model.zero_grad(set_to_none=step == 1)
    wrapper(_xs(rank, 2)).backward()
    _check(model, _sums(2))
    with contextlib.nullcontext() if sync else wrapper.no_sync():
        wrapper(_xs(rank, 3)).backward()


class Normed(nn.Module):
    """Batchnorm, and a buffer of integers."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.steps += x.shape[0]
        return self.last(self.norm(x))


def _normed(rank):
    torch.manual_seed(rank)
    return Normed()


def buffers_stay_equal(rank):
    """Rank 0's arrive on all ranks at construction and with each reduction."""
    model = _normed(rank)
    model.norm.running_mean.fill_(rank + 1.0)
    wrapper = DistributedDataParallel(model)
    assert model.norm.running_mean.eq(1.0).all()
    for step in range(3):
        with wrapper.no_sync():
            wrapper(_numbers(rank, step, 4 + rank, 3)).sum().backward()
        wrapper(_numbers(rank, 10 + step, 4 + rank, 3)).sum().backward()
    assert model.steps.tolist() == [24, 24]
    return [buffer.clone() for buffer in model.buffers()] + _grads(model)


def evaluation_on_one_rank(rank):
    """Before, between and after training steps; without gradients, and with them in eval()."""
    model = _normed(rank)
    wrapper = DistributedDataParallel(model)

    def evaluate():
        if rank == 0:
            with torch.no_grad():
                wrapper(torch.ones(2, 3))
            wrapper.eval()
            with torch.inference_mode():
                wrapper(torch.ones(2, 3))
            wrapper(torch.ones(2, 3))
            wrapper.train()

    evaluate()
    for step in range(2):
        wrapper(_numbers(rank, step, 4, 3)).sum().backward()
        evaluate()
    dist.barrier()
    return [p.clone() for p in model.parameters()] + _grads(model)


def loaded_by_rank_0_alone(rank):
    """What rank 0 loads after wrapping arrives with the first training forward."""
    model = _normed(rank)
    wrapper = DistributedDataParallel(model)
    if rank == 0:
        torch.manual_seed(5)
        wrapper.load_state_dict({f"module.{k}": v for k, v in Normed().state_dict().items()})
    wrapper(_numbers(rank, 0, 4, 3)).sum().backward()
    torch.manual_seed(5)
    assert torch.equal(model.last.weight, Normed().last.weight)
    return [p.clone() for p in model.parameters()] + _grads(model)


def trained_in_eval(rank):
    model = _normed(rank)
    wrapper = DistributedDataParallel(model).eval()
    for step in range(2):
        wrapper(_numbers(rank, step, 4, 3)).sum().backward()
    return [p.clone() for p in model.parameters()] + _grads(model)


def taken_by_another_hook(rank):
    layer = nn.Linear(2, 2)
    layer.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    DistributedDataParallel(layer)(torch.ones(1, 2)).sum().backward()


def complex_gradients(rank):
    weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    module = nn.ParameterList([weight, nn.Parameter(torch.zeros(2))])
    wrapper = DistributedDataParallel(module)
    (weight * torch.tensor([1.0, 2j * rank, 3.0])).real.sum().backward()
    assert weight.grad.tolist() == [1.0, -1j, 3.0]
    assert wrapper.module[1].grad is None
    return [weight.grad]


def copies(rank):
    """A deep copy and an unpickled wrapper reduce their own gradients alone."""
    wrapper = DistributedDataParallel(Scales(), message_size=6)
    wrapper(_xs(rank, 0)).backward()
    found = []
    for other in (copy.deepcopy(wrapper), reloaded(wrapper)):
        assert other.module.w0 is not wrapper.module.w0
        other.zero_grad()
        other(_xs(rank, 1)).backward()
        _check(other.module, [total / 2 for total in _sums(1)])
        _check(wrapper.module, [total / 2 for total in _sums(0)])
        found += _grads(other.module)
    group = dist.new_group([0, 1])
    grouped = DistributedDataParallel(Scales(), process_group=group)
    copy.deepcopy(grouped)(_xs(rank, 0)).backward()
    with contextlib.suppress(RuntimeError):
        torch.save(grouped, io.BytesIO())
        raise AssertionError("pickled with a process group of its own")
    return found


def in_a_group(rank):
    """Each rank in a group of its own: nothing is averaged."""
    groups = [dist.new_group([number]) for number in range(dist.get_world_size())]
    model = Scales()
    DistributedDataParallel(model, process_group=groups[rank])(_xs(rank, 0)).backward()
    _check(model, _xs(rank, 0))
    other = Scales()
    pair = ([groups[rank]] * 2, [None] * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapper = DistributedDataParallel(
            other, num_allreduce_streams=2, allreduce_communicators=pair
        )
    assert "num_allreduce_streams has no effect" in str(caught[0].message)
    wrapper(_xs(rank, 0)).backward()
    _check(other, _xs(rank, 0))


def recomputed(rank, use_reentrant):
    """Layers are recomputed in backward, one of them twice; sums show a second reduction."""

    class Net(nn.ModuleList):
        def forward(self, x):
            for layer in (*self, self[0]):
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return x

    torch.manual_seed(0)
    model = Net(nn.Linear(2, 2, bias=False) for _ in range(3))
    for layer in model:
        layer.weight.data = _numbers(7, 1, 2, 2)
    bare = copy.deepcopy(model)
    wrapper = DistributedDataParallel(model, message_size=1, gradient_average=False)
    for step in range(3):
        model.zero_grad()
        bare.zero_grad()
        wrapper(_numbers(rank, step, 3, 2).requires_grad_()).sum().backward()
        for other in range(2):
            bare(_numbers(other, step, 3, 2).requires_grad_()).sum().backward()
        _check(model, [p.grad for p in bare.parameters()])
    return _grads(model)


def wrapped_twice(rank):
    """Two wrappers of one module, and one inside another: each gradient is reduced once."""
    model = Scales()
    first = DistributedDataParallel(model, gradient_average=False)
    second = DistributedDataParallel(model, gradient_average=False)
    for step, wrapper in enumerate([second, first, second, first]):
        model.zero_grad()
        wrapper(_xs(rank, step)).backward()
        _check(model, _sums(step))
    inner = DistributedDataParallel(nn.Linear(2, 2, bias=False), gradient_average=False)
    outer = DistributedDataParallel(
        nn.Sequential(inner, nn.Linear(2, 2, bias=False)), gradient_average=False
    )
    for weight in outer.parameters():
        weight.data = _numbers(7, 1, 2, 2)
    bare = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(2)])
    bare.load_state_dict({f"{i}.weight": _numbers(7, 1, 2, 2) for i in range(2)})
    outer(_numbers(rank, 0, 3, 2)).sum().backward()
    for other in range(2):
        bare(_numbers(other, 0, 3, 2)).sum().backward()
    _check(outer, [p.grad for p in bare.parameters()])
    return _grads(model)


def failing_backward(rank, reduced):
    """An error in the middle of a backward pass: before anything was reduced, or after."""

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("planned")

    class Net(nn.ModuleList):
        def forward(self, x, fails=False):
            x = self[0](x)
            return self[1](Fail.apply(x) if fails else x)

    model = Net(nn.Linear(2, 2, bias=False) for _ in range(2))
    for weight in model.parameters():
        weight.data = _numbers(7, 1, 2, 2)
    wrapper = DistributedDataParallel(model, message_size=1 if reduced else 1000)
    wrapper(_numbers(rank, 0, 3, 2)).sum().backward()
    wanted = _grads(model)
    model.zero_grad()
    with contextlib.suppress(ValueError):
        wrapper(_numbers(rank, 0, 3, 2), fails=True).sum().backward()
    model.zero_grad()
    for call in (wrapper, wrapper, model):  # it stays so
        try:
            call(_numbers(rank, 0, 3, 2)).sum().backward()
        except RuntimeError as error:
            assert "a backward pass failed on this rank" in str(error)  # noqa: PT017
        else:
            raise AssertionError("nothing was said")
    model.zero_grad()
    wrapper = DistributedDataParallel(model)  # it has failed on all ranks alike
    wrapper(_numbers(rank, 0, 3, 2)).sum().backward()
    _check(model, wanted)
    return _grads(model)


def other_modules(rank):
    DistributedDataParallel(nn.Linear(2, 2 + rank))


def sparse_gradients(rank):
    wrapper = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    wrapper(torch.tensor([rank])).sum().backward()


def methods_of_the_original(rank):
    """The parts of the original's wrapper that programs may call."""
    model = Scales(dtypes=(torch.float32, torch.bfloat16))
    wrapper = DistributedDataParallel(model, message_size=6, allreduce_always_fp32=True)
    wrapper.create_hooks()
    wrapper.sync_bucket_structure()
    flat = wrapper.allreduce_bucket([_numbers(rank, 0, 2, 2), _numbers(rank, 1, 3)], 0, False)
    wanted = torch.cat([(_numbers(0, n, 4) + _numbers(1, n, 4)) / 2 for n in (0, 1)])
    assert torch.equal(flat[:4], wanted[:4])
    assert flat.shape == (7,)
    fine = torch.full((2,), 1.0 + 2.0**-40, dtype=torch.float64)
    assert wrapper.allreduce_bucket([fine], 0, False).eq(fine).all()  # always_fp32 widens alone
    for weight, x in zip(model.parameters(), _xs(rank, 0), strict=True):
        weight.grad = x.to(weight.dtype)
    wrapper.allreduce_fallback()
    _check(model, [total / 2 for total in _sums(0)])
    model.zero_grad()
    wrapper(_xs(rank, 1)).backward()
    _check(model, [total / 2 for total in _sums(1)])
    return _grads(model)


def begun(rank, level, **options):
    """A model and its optimizer, other seeds on each rank."""
    amp.reset()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"loss_scale": "dynamic", "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, **options)


def train(rank, wrapper, optimizer, steps, overflow=None):
    """Different data on each rank; returns which steps were taken."""
    taken = []
    for step in steps:
        optimizer.zero_grad()
        x = _numbers(rank, step, 8, 6)
        loss = nn.functional.cross_entropy(wrapper(x).float(), x[:, 0].gt(0).long())
        if rank == 1 and step == overflow:
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        taken.append(amp.stepped(optimizer))
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return taken


def everything(model, optimizer):
    tensors = [*amp.master_params(optimizer), *model.parameters(), *model.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    scale = torch.tensor(list(amp.state_dict()["loss_scaler0"].values()))
    return [tensor.detach().clone() for tensor in tensors] + [scale]


def resumed(rank, level, who, when):
    """Ranks save after four steps; a new job that loads goes on as if it had not stopped."""
    options = {"init_scale": 2.0**10, "growth_interval": 3}
    model, optimizer = begun(rank, level, **options)
    wrapper = DistributedDataParallel(model)
    train(rank, wrapper, optimizer, range(4))
    saved = reloaded([wrapper.state_dict(), optimizer.state_dict(), amp.state_dict()])
    train(rank, wrapper, optimizer, range(4, 8))
    wanted = everything(model, optimizer)

    model, optimizer = begun(rank, level, **options)
    wrapper = DistributedDataParallel(model) if when == "after" else None
    state, optimizer_state, amp_state = saved
    optimizer.load_state_dict(optimizer_state)
    if who == "all" or rank == 0:
        if wrapper is None:
            model.load_state_dict({k.removeprefix("module."): v for k, v in state.items()})
        else:
            wrapper.load_state_dict(state)
        amp.load_state_dict(amp_state)
    train(rank, wrapper or DistributedDataParallel(model), optimizer, range(4, 8))
    assert all(map(torch.equal, everything(model, optimizer), wanted))
    return wanted


ACCUMULATIONS = (
    "no_sync",
    "disable_allreduce",
    "forward in no_sync, backward outside",
    "one backward of two forwards",
    "one backward of two forwards, one in no_sync",
    "two forwards, two backwards",
    "both reduce",
    "past the wrapper",
)
PROGRAMS = [
    *(
        functools.partial(sums_are_exact, options=tuple(options.items()))
        for options in (
            {},
            {"message_size": 1},
            {"message_size": 7},
            {"delay_allreduce": True},
            {"message_size": 7, "retain_allreduce_buffers": True},
            {"message_size": 7, "allreduce_always_fp32": True},
            {"message_size": 7, "gradient_average": False},
            {"gradient_predivide_factor": 4.0},
            {"gradient_average": False, "gradient_predivide_factor": 2.0},
            {"gradient_average_split_factor": 2.0},
        )
    ),
    functools.partial(sums_are_exact, options=(), trigger=True),
    *(functools.partial(accumulates, how=how) for how in ACCUMULATIONS),
    second_backward_of_one_forward,
    derivatives_without_gradients,
    functools.partial(unused_parameters, options=()),
    functools.partial(unused_parameters, options=(("message_size", 1),)),
    functools.partial(unused_parameters, options=(("retain_allreduce_buffers", True),)),
    frozen_and_unfrozen,
    all_frozen_and_empty,
    cast_between_steps,
    buffers_stay_equal,
    evaluation_on_one_rank,
    loaded_by_rank_0_alone,
    trained_in_eval,
    complex_gradients,
    copies,
    functools.partial(recomputed, use_reentrant=True),
    functools.partial(recomputed, use_reentrant=False),
    wrapped_twice,
    functools.partial(failing_backward, reduced=False),
    functools.partial(failing_backward, reduced=True),
    methods_of_the_original,
    *(
        functools.partial(resumed, level=level, who=who, when=when)
        for level in ("O0", "O1", "O2", "O5")
        for who in ("all", "rank 0")
        for when in ("before", "after")
    ),
]
