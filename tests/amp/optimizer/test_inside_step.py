"""Code of the program inside of ``step()``: it reads and writes the model's weights and the groups.

The numbers are dyadic and few, so that float16 and bfloat16 have them all: what is trained at a
level is bit for bit what plain torch trains.
"""

import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex import amp
from apex.optimizers import FusedSGD
from apex.parallel import LARC
from tests.amp.training import MASTERED, scaled_backward

LR = 0.125


def own_base():
    """An optimizer of the program's own; a new class each time, which torch has not hooked yet."""

    class Own(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                for param in group["params"]:
                    self.update(param, group["lr"])
            return loss

        def update(self, param, lr):
            param.add_(param.grad, alpha=-lr)

    return Own


def hooked_base():
    """The same, once a plain instance was made in the process: torch hooks its step, too."""
    base = own_base()
    base([torch.zeros(1)], lr=LR)
    return base


def data_base():
    class ThroughData(own_base()):
        def update(self, param, lr):
            param.data.sub_(param.grad.data, alpha=lr)

    return ThroughData


BASES = {
    "sgd": lambda: torch.optim.SGD,
    "fused": lambda: FusedSGD,
    "own": own_base,
    "hooked": hooked_base,
    "data": data_base,
}


class Lookahead:
    """A wrapper of 2019, which is no optimizer of torch: slow weights follow the fast ones."""

    def __init__(self, optimizer, code):
        self.optimizer, self.code = optimizer, code
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.slow = None

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, group):
        self.optimizer.add_param_group(group)

    def step(self, closure=None):
        fast = [param for group in self.param_groups for param in group["params"]]
        self.slow = self.slow or [param.detach().clone() for param in fast]
        loss = self.optimizer.step(closure)
        for slow, param in zip(self.slow, fast, strict=True):
            slow.add_(param.data - slow, alpha=0.5)
            param.data.copy_(slow)
        self.code(self)
        return loss


def post_hook(base, params, code):
    optimizer = base(params, lr=LR)
    optimizer.register_step_post_hook(lambda one, *_: code(one))
    return optimizer


def pre_hook(base, params, code):
    optimizer = base(params, lr=LR)
    optimizer.register_step_pre_hook(lambda one, *_: code(one))
    return optimizer


def subclass(base, params, code):
    class Sub(base):
        def step(self, closure=None):
            loss = super().step(closure)
            code(self)
            return loss

    return Sub(params, lr=LR)


def subclass_that_begins(base, params, code):
    class Sub(base):
        def step(self, closure=None):
            code(self)
            return super().step(closure)

    return Sub(params, lr=LR)


def subclass_with_hook(base, params, code):
    optimizer = subclass(base, params, code)
    optimizer.register_step_post_hook(lambda one, *_: code(one))
    return optimizer


def twice(base, params, code):
    class Sub(base):
        def step(self, closure=None):
            super().step(closure)
            code(self)
            return super().step(closure)

    return Sub(params, lr=LR)


def wrapped_before(base, params, code):
    optimizer = base(params, lr=LR)
    inner = optimizer.step

    def step(closure=None):
        loss = inner(closure)
        code(optimizer)
        return loss

    optimizer.step = step
    return optimizer


def lookahead(base, params, code):
    return Lookahead(base(params, lr=LR), code)


def larc(base, params, code):
    optimizer = LARC(base(params, lr=LR), trust_coefficient=8.0, eps=0.0)  # the rate is the lr
    optimizer.optim.register_step_post_hook(lambda one, *_: code(one))
    return optimizer


PLACES = [
    *(post_hook, pre_hook, subclass, subclass_that_begins, subclass_with_hook, twice),
    *(wrapped_before, lookahead, larc),
]


@torch.no_grad()
def halve_weights(model, optimizer):
    for weight in model.parameters():
        weight.mul_(0.5)


def halve_through_data(model, optimizer):
    for weight in model.parameters():
        weight.data.mul_(0.5)


@torch.no_grad()
def clamp_groups(model, optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.clamp_(-0.75, 0.75)


def groups_then_weights(model, optimizer):
    clamp_groups(model, optimizer)
    halve_weights(model, optimizer)


def weights_then_groups(model, optimizer):
    halve_weights(model, optimizer)
    clamp_groups(model, optimizer)


def nothing(model, optimizer):
    pass


CODES = [
    *(halve_weights, halve_through_data, clamp_groups, groups_then_weights, weights_then_groups),
    nothing,
]


def trained(level, base, place, code, *, closure=False):
    """What the code has seen, and the weights after three steps."""
    amp.reset()
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0, 0.5, 2.0]]))
    seen = []

    def inside(optimizer):
        seen.append(model.weight.detach().float().clone())
        code(model, optimizer)
        seen.append(torch.stack([w.detach().float().sum() for w in model.parameters()]))

    optimizer = place(BASES[base](), model.parameters(), inside)
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)

    def backward():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).sum()
        scaled_backward(loss, optimizer) if level else loss.backward()
        return loss

    for _ in range(3):
        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
    seen.append(model(torch.eye(4)).detach().float())
    return [*seen, *[value.float() for value in model.state_dict().values()]]


@pytest.mark.parametrize("code", [halve_through_data, weights_then_groups])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("base", BASES)
def test_code_inside_of_a_step_does_what_it_does_in_plain_torch(base, place, code):
    compare("O2", base, place, code)


@pytest.mark.exhaustive
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("level", MASTERED)
def test_all_code_inside_of_a_step_does_what_it_does_in_plain_torch(level, base, place, code):
    compare(level, base, place, code)


def compare(level, base, place, code):
    wanted = trained(None, base, place, code)
    got = trained(level, base, place, code)
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("place", [post_hook, pre_hook, subclass, subclass_that_begins, twice])
@pytest.mark.parametrize("base", ["sgd", "own", "hooked"])
@pytest.mark.parametrize("level", MASTERED)
def test_with_a_closure(level, base, place):
    wanted = trained(None, base, place, halve_weights, closure=True)
    got = trained(level, base, place, halve_weights, closure=True)
    assert all(map(torch.equal, got, wanted))
    assert len(got) == len(wanted)


@pytest.mark.parametrize("level", MASTERED)
def test_a_clip_of_the_models_gradients_in_a_pre_hook_warns(level):
    def clip(model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)

    with pytest.warns(UserWarning, match="gradients of 16-bit model weights were changed"):
        trained(level, "sgd", pre_hook, clip)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(level, "sgd", pre_hook, halve_weights)


# -- random programs -------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ParameterList([torch.tensor([1.0, -0.5]) for _ in range(2)])
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, number):
        return (self.experts[number] + self.bias).sum()


def all_to_none(model, optimizer):
    optimizer.zero_grad()


def zeros_by_optimizer(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def zeros_by_model(model, optimizer):
    model.zero_grad(set_to_none=False)


def zeros_by_hand(model, optimizer):
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()


CLEARS = [all_to_none, zeros_by_optimizer, zeros_by_model, zeros_by_hand]


def broadcast_groups(model, optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data.mul_(0.5)  # as another rank's values are
            if dist.is_available():
                dist.broadcast(param.data, 0)


def freeze(model, optimizer):
    model.bias.requires_grad_(not model.bias.requires_grad)


BETWEEN = [nothing, nothing, nothing, halve_weights, clamp_groups, broadcast_groups, freeze]


def draw(seed, length=4):
    """A place for code, and for each step: an expert, how to clear, code between steps and in."""
    chance = random.Random(seed)
    steps = [
        (chance.randrange(2), *map(chance.choice, (CLEARS, BETWEEN, CODES))) for _ in range(length)
    ]
    return chance.choice(["sgd", "fused"]), chance.choice(PLACES[:-1]), chance.random() < 0.3, steps


def with_momentum(base):
    """A class of the program's: with one of torch's own a step is watched only where hooks are."""

    class WithMomentum(base):
        def __init__(self, params, lr):
            super().__init__(params, lr=lr, momentum=0.5)

    return WithMomentum


def run(level, program):
    base, place, is_frozen, steps = program
    amp.reset()
    model, codes, found = Experts(), [], []
    model.bias.requires_grad_(not is_frozen)
    optimizer = place(
        with_momentum(BASES[base]()),
        model.parameters(),
        lambda one: codes[0](model, one),
    )
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for number, clear, between, inside in steps:
        codes[:] = [inside]
        clear(model, optimizer)
        between(model, optimizer)
        loss = model(number)
        scaled_backward(loss, optimizer) if level else loss.backward()
        optimizer.step()
        found += [value.float().clone() for value in model.state_dict().values()]
    return found


def check_programs(seeds):
    for seed in seeds:
        program = draw(seed)
        wanted, got = run(None, program), run("O2", program)
        if not all(map(torch.equal, wanted, got)):
            pytest.fail(f"seed {seed}: {program}: {got} for {wanted}")


@pytest.fixture
def one_rank():
    if dist.is_available():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_available():
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_random_programs_are_those_of_plain_torch():
    check_programs(range(20))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_rank")
def test_many_random_programs_are_those_of_plain_torch():
    check_programs(range(300))


@pytest.mark.parametrize("level", MASTERED)
def test_a_scheduler_made_before_initialize_is_no_code_of_the_program(level):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert optimizer._amp_stash._is_closed
