"""What ``initialize`` refuses changes nothing: it checks everything before its first change."""

import pytest
import torch
import torch.distributed.checkpoint.state_dict  # or the first initialize at O2 imports it
import torch.nn.functional as F
from torch import nn

from apex import amp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.rnn = nn.GRU(4, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return self.rnn(self.norm(self.linear(x)))[0]


class Guarded(type):
    broken = False

    def __setattr__(cls, name, value):
        if Guarded.broken:
            raise TypeError("planted")
        super().__setattr__(name, value)


class Owner(metaclass=Guarded):
    @staticmethod
    def function(x):
        return x


@pytest.fixture(autouse=True)
def _repaired():
    yield
    Guarded.broken = False


def broken_registration():
    amp.register_half_function(torch, "sigmoid")
    amp.register_half_function(Owner, "function")
    Guarded.broken = True


def block(model, optimizer, **options):
    with amp.scale_loss(model(torch.randn(4, 3)).float().square().sum(), optimizer, **options) as s:
        s.backward()


def process():
    keys = torch._C._dispatch_get_registrations_for_dispatch_key
    spaces = (torch, F, torch.Tensor, Owner, torch.utils.checkpoint.CheckpointFunction)
    spaces += (torch.distributed.checkpoint.state_dict,)
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
        [(id(t), t.dtype, t.data_ptr(), t._version, id(t.grad)) for t in tensors],
    )


def values(model, optimizer):
    state = optimizer.state_dict()["state"]
    return [
        *[t.clone() for t in model.state_dict().values()],
        *[t.clone() for entry in state.values() for t in entry.values()],
    ]


def sgd(*groups):
    """An optimizer whose groups are changed after it was made."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.param_groups[:] = groups
    return optimizer


def inference_weight():
    with torch.inference_mode():
        return nn.Parameter(torch.zeros(2))


def twice():
    weight = torch.zeros(2, requires_grad=True)
    return sgd({"params": [weight]}, {"params": (weight,)})


# What is passed beside a model and its optimizer, and what it raises.
REFUSED = {
    "level": ({"opt_level": "O9"}, RuntimeError),
    "level as enabled": ({"enabled": "O2"}, TypeError),
    "verbosity": ({"verbosity": None}, TypeError),
    "scale": ({"loss_scale": -1.0}, ValueError),
    "growth": ({"growth_factor": 0.5, "loss_scale": "dynamic"}, ValueError),
    "losses": ({"num_losses": 0}, ValueError),
    "skipped steps": ({"max_skipped_steps": 0}, ValueError),
    "outputs": ({"cast_model_outputs": "half"}, TypeError),
    "group": ({"process_group": 3}, TypeError),
    "fused step": ({"fused_step": True}, RuntimeError),
    "no optimizer": ([], [3], TypeError),
    "no params": ([], [sgd({"lr": 0.1})], TypeError),
    "no tensors": ([], [sgd({"params": ["weight"]})], TypeError),
    "weight twice": ([], [twice()], ValueError),
    "inference weight": ([], [sgd({"params": [inference_weight()]})], RuntimeError),
    "no model": ([3], [], TypeError),
    "float64 model": ([nn.Linear(2, 2).double()], [], RuntimeError),
    "lazy model": ([nn.LazyLinear(2)], [], RuntimeError),
}


@pytest.mark.parametrize("first", [None, "O1", "O2"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(case, first):
    *added, error = REFUSED[case]
    models, optimizers = ([], []) if len(added) == 1 else added
    options = {"opt_level": "O2", "verbosity": 0, **(added[0] if len(added) == 1 else {})}

    def train(refused):
        amp.reset()
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if first is not None:
            amp.initialize(model, optimizer, opt_level=first, verbosity=0, loss_scale=128.0)
            block(model, optimizer)
            optimizer.step()
            block(model, optimizer, delay_unscale=True)
        if refused:
            before = process(), objects(model, optimizer)
            with pytest.raises(error):
                amp.initialize([model, *models], [optimizer, *optimizers], **options)
            assert (process(), objects(model, optimizer)) == before
        if first is not None:
            block(model, optimizer)
            optimizer.step()
        amp.reset()
        return [*values(model, optimizer), *[t.detach() for t in model.parameters()]]

    torch.manual_seed(0)
    for one, other in zip(train(True), train(False), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("first", [None, "O0", "O2", "O4"])
@pytest.mark.parametrize("later", ["O1", "O4"])
def test_a_registration_that_can_no_longer_be_made_changes_nothing(later, first):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if first is not None:
        amp.initialize(model, optimizer, opt_level=first, verbosity=0)
    broken_registration()
    before = process(), objects(model, optimizer)
    with pytest.raises(TypeError, match=r"Owner\.function cannot be replaced: planted"):
        amp.initialize(model, optimizer, opt_level=later, verbosity=0)
    assert (process(), objects(model, optimizer)) == before


def test_a_failing_init_changes_nothing():
    broken_registration()
    before = process()
    with pytest.raises(TypeError, match="planted"):
        amp.init()
    assert process() == before
    Guarded.broken = False
    amp.init()  # with the registrations, which still hold
    assert torch.sigmoid(torch.ones(2)).dtype == torch.float16


# -- a weight twice in the groups of one optimizer -------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_weight_is_added_once(level):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    new = nn.Parameter(torch.zeros(2))
    before = objects(model, optimizer)
    for params in (model.weight, [new, new], (p for p in (new, model.bias))):
        with pytest.raises(ValueError, match="more than one parameter group.*weight once"):
            optimizer.add_param_group({"params": params})
        assert objects(model, optimizer) == before
    optimizer.add_param_group({"params": (p for p in (new,))})
    assert len(list(amp.master_params(optimizer))) == 3


def test_a_weight_beside_its_master_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    optimizer.param_groups[0]["params"].append(model.weight)
    with pytest.raises(ValueError, match="itself or its float32 master"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


# -- registrations ---------------------------------------------------------------------------------


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
