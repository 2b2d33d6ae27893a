"""An ``initialize`` that raises has changed nothing, wherever it fails."""

import pytest
import torch
import torch.distributed.checkpoint.state_dict  # or the first initialize at O2 imports it
import torch.nn.functional as F
from torch import nn

from apex import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.rnn = Flattened(4, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return self.rnn(self.norm(self.linear(x)))[0]


class Flattened(nn.GRU):
    broken = False

    def flatten_parameters(self):
        if self.broken:
            raise ArithmeticError("planted")
        super().flatten_parameters()


class SGD(torch.optim.SGD):
    broken = False

    def __setattr__(self, name, value):
        if self.broken and name == "_amp_stash":
            raise ArithmeticError("planted")
        super().__setattr__(name, value)


class Guarded(type):
    broken = False

    def __setattr__(cls, name, value):
        if Guarded.broken:
            raise ArithmeticError("planted")
        super().__setattr__(name, value)


class Owner(metaclass=Guarded):
    @staticmethod
    def function(x):
        return x


def in_convert(model, optimizer):
    Flattened.broken = True


def in_the_optimizers_record(model, optimizer):
    SGD.broken = True


# The registration came too late for the training that goes on, which scale_loss says.
pytestmark = pytest.mark.filterwarnings("ignore:amp.register_half_function")


def in_a_registration(model, optimizer):
    amp.register_half_function(torch, "sigmoid")
    amp.register_half_function(Owner, "function")
    Guarded.broken = True


PLACES = {
    "convert": (in_convert, ("O2", "O3", "O5")),
    "record": (in_the_optimizers_record, LEVELS),
    "registration": (in_a_registration, ("O1", "O4")),
}
CASES = [(place, later) for place, (_, levels) in PLACES.items() for later in levels]


def repaired():
    Flattened.broken = SGD.broken = Guarded.broken = False


@pytest.fixture(autouse=True)
def _repaired():
    yield
    repaired()


def block(model, optimizer, **options):
    with amp.scale_loss(model(torch.randn(4, 3)).float().square().sum(), optimizer, **options) as s:
        s.backward()


def process():
    keys = torch._C._dispatch_get_registrations_for_dispatch_key
    spaces = (torch, F, torch.Tensor, Owner, torch.utils.checkpoint.CheckpointFunction)
    return (
        set(keys("AutocastCPU")),
        {(space, name): value for space in spaces for name, value in vars(space).items()},
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        dict(vars(amp._amp_state)),
    )


def objects(model, optimizer):
    """Everything of a training that may be found on its objects, and what tensors look like."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p for group in optimizer.param_groups for p in group["params"]]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    return (
        [{k: id(h) for k, h in m._forward_pre_hooks.items()} for m in model.modules()],
        [{k: id(h) for k, h in m._forward_hooks.items()} for m in model.modules()],
        [{k: id(h) for k, h in m._state_dict_hooks.items()} for m in model.modules()],
        {name: id(value) for name, value in vars(optimizer).items()},
        [{name: id(value) for name, value in group.items()} for group in optimizer.param_groups],
        {id(param): {n: id(v) for n, v in s.items()} for param, s in optimizer.state.items()},
        [(id(t), t.dtype, t.data_ptr(), id(t.grad)) for t in tensors],
    )


def values(model, optimizer):
    state = optimizer.state_dict()["state"]
    return [
        *[t.clone() for t in model.state_dict().values()],
        *[t.clone() for entry in state.values() for t in entry.values()],
    ]


@pytest.mark.parametrize("first", [None, *LEVELS])
@pytest.mark.parametrize(("place", "later"), CASES)
def test_a_failing_initialize_changes_nothing(place, later, first):
    def train(failing):
        repaired()
        amp.reset()
        torch.manual_seed(0)
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        if first is not None:
            options = {"opt_level": first, "verbosity": 0, "loss_scale": 128.0}
            amp.initialize(model, optimizer, **options)
            block(model, optimizer)
            optimizer.step()
            block(model, optimizer, delay_unscale=True)
        if failing:
            PLACES[place][0](model, optimizer)
            before = process(), objects(model, optimizer)
            with pytest.raises(ArithmeticError, match="planted"):
                amp.initialize(model, optimizer, opt_level=later, verbosity=0)
            assert (process(), objects(model, optimizer)) == before
            repaired()
        if first is not None:
            block(model, optimizer)
            optimizer.step()
        amp.reset()
        return [*values(model, optimizer), *[t.detach() for t in model.parameters()]]

    torch.manual_seed(0)
    expected = train(False)
    for one, other in zip(train(True), expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_failing_init_changes_nothing():
    amp.register_half_function(torch, "sigmoid")
    amp.register_half_function(Owner, "function")
    Guarded.broken = True
    before = process()
    with pytest.raises(ArithmeticError, match="planted"):
        amp.init()
    assert process() == before
    repaired()
    amp.init()  # with the registrations, which still wait
    assert torch.sigmoid(torch.ones(2)).dtype == torch.float16


# -- what is refused before ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "match"),
    [
        (dict, "get", r"dict\.get cannot be replaced: .*immutable.*amp\.half_function"),
        (torch, "pi", r"torch\.pi cannot be replaced: it is a float, not a function"),
        (torch.Tensor, "T", r"Tensor\.T cannot be replaced: .* not a function"),
    ],
)
def test_a_registration_that_cannot_work_is_refused_when_it_is_made(owner, name, match):
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    before = process()
    with pytest.raises(TypeError, match=match):
        amp.register_half_function(owner, name)
    assert process() == before
    amp.initialize(model, opt_level="O1", verbosity=0)


def test_registering_a_function_changes_nothing_yet():
    class Base:
        @staticmethod
        def function(x):
            return x

    class Derived(Base):
        pass

    before = dict(vars(Derived)), dict(vars(Base))
    amp.register_half_function(Derived, "function")
    assert (dict(vars(Derived)), dict(vars(Base))) == before


class Slotted:
    __slots__ = ("param_groups", "state")

    def __init__(self, params):
        self.param_groups, self.state = [{"params": list(params)}], {}

    def step(self):
        raise NotImplementedError

    zero_grad = add_param_group = step


class ReadOnly(Slotted):
    step = property(lambda self: lambda closure=None: None)


@pytest.mark.parametrize("make", [Slotted, ReadOnly])
def test_an_optimizer_whose_step_cannot_be_set_is_refused(make):
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    with pytest.raises(TypeError, match="'step' of .* cannot be set.*Pass an optimizer"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert model.weight.dtype == torch.float32
    assert not model._forward_pre_hooks
