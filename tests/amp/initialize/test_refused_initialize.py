"""What ``initialize`` refuses changes nothing: it checks everything before its first change."""

import pytest
import torch
import torch.distributed.checkpoint.state_dict  # or the first initialize at O2 imports it
import torch.nn.functional as F
from torch import nn

from apex import amp
from tests.amp.levels import assert_same, autocast_state
from tests.amp.training import scaled_backward, started


def sgd(*groups):
    """An optimizer whose groups are changed after it was made."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.param_groups[:] = groups
    return optimizer


def inference_weight():
    with torch.inference_mode():
        return nn.Parameter(torch.zeros(2))


class Slotted:
    __slots__ = ("param_groups", "state")

    def step(self):
        raise NotImplementedError

    zero_grad = add_param_group = step


WEIGHT = torch.zeros(2, requires_grad=True)
TWICE = sgd({"params": [torch.zeros(2, requires_grad=True)]})
HALF, INT8 = torch.float16, torch.int8
NO_GROUP = r"process_group was .*mesh.get_group\(name\)"


# Options, what they raise, and its text.
REFUSED_OPTIONS = [
    ({"opt_level": "O6"}, RuntimeError, r"'O6'.*'O0', 'O1'.*letter O"),
    ({"opt_level": "01"}, RuntimeError, "letter O"),
    ({"opt_level": None}, RuntimeError, "Unexpected optimization level None"),
    ({"opt_level": "O1", "cast_model_type": HALF}, RuntimeError, "cast_model_type=.*float16 at O1"),
    ({"opt_level": "O4", "keep_batchnorm_fp32": False}, RuntimeError, "keep_b.*=False at O4"),
    ({"opt_level": "O1", "master_weights": False}, RuntimeError, "master_weights=False at O1"),
    ({"enabled": "O2"}, TypeError, "enabled, the third argument, was 'O2'"),
    ({"verbosity": "loud"}, TypeError, "verbosity was 'loud'; it must be 0, 1 or 2"),
    ({"patch_torch_functions": True}, RuntimeError, "only O1 and O4"),
    ({"keep_batchnorm_fp32": "true"}, AssertionError, "was 'true'"),
    ({"cast_model_type": INT8}, ValueError, "cast_model_type was torch.int8"),
    ({"loss_scale": "Dynamic"}, ValueError, "loss_scale was 'Dynamic'; allowed are"),
    ({"loss_scale": -1.0}, ValueError, "loss_scale was -1.0"),
    ({"init_scale": "large"}, ValueError, "init_scale was 'large'; it must be above 0"),
    ({"growth_factor": 0.5}, ValueError, "growth_factor was 0.5"),
    ({"num_losses": 0}, ValueError, "num_losses was 0"),
    ({"max_skipped_steps": 0}, ValueError, "max_skipped_steps was 0"),
    ({"cast_model_outputs": "half"}, TypeError, "cast_model_outputs was 'half'"),
    *(({"process_group": g}, TypeError, NO_GROUP) for g in (3, -100, "world", [0, 1])),
    ({"fused_step": True}, RuntimeError, "fused_step=True was given with SGD"),
]


# What is passed beside a model and its optimizer.
NO_MODEL, NO_OPTIMIZER = "must be a torch.nn.Module or a list", "must be a single optimizer or a"
REFUSED_OBJECTS = [
    ([], [3], TypeError, NO_OPTIMIZER),
    ([], [torch.optim.SGD], TypeError, NO_OPTIMIZER),
    ([], [Slotted()], TypeError, NO_OPTIMIZER),
    ([], [sgd({"lr": 0.1})], TypeError, "was or held a NoneType"),
    ([], [sgd({"params": ["weight"]})], TypeError, "was or held a str"),
    ([], [sgd({"params": [inference_weight()]})], RuntimeError, "created in torch.inference_mode"),
    ([], [sgd({"params": [WEIGHT]}, {"params": (WEIGHT,)})], ValueError, "Pass each weight once"),
    ([], [TWICE, TWICE], ValueError, "passed twice"),
    (
        [],
        [type("FP16_Optimizer", (), {})()],
        RuntimeError,
        "Pass the optimizer that it wraps",
    ),
    ([3], [], TypeError, NO_MODEL),
    ([nn.Linear(2, 2).double()], [], RuntimeError, "of torch.float64"),
    ([nn.LazyLinear(2)], [], RuntimeError, "has no shape yet"),
]


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
    scaled_backward(model(torch.randn(4, 3)).float().square().sum(), optimizer, **options)


def process():
    keys = torch._C._dispatch_get_registrations_for_dispatch_key
    spaces = (torch, F, torch.Tensor, Owner, torch.utils.checkpoint.CheckpointFunction)
    spaces += (torch.distributed.checkpoint.state_dict,)
    return (
        set(keys("AutocastCPU")),
        {(space, name): value for space in spaces for name, value in vars(space).items()},
        autocast_state(),
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


@pytest.mark.parametrize("first", [None, "O1", "O2"])
@pytest.mark.parametrize(
    ("options", "models", "optimizers", "error", "match"),
    [
        *((options, [], [], *raised) for options, *raised in REFUSED_OPTIONS),
        *(({}, *case) for case in REFUSED_OBJECTS),
    ],
)
def test_what_is_refused_changes_nothing(first, options, models, optimizers, error, match):
    options = {"opt_level": "O2", "verbosity": 0, **options}

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
            with pytest.raises(error, match=match):
                amp.initialize([model, *models], [optimizer, *optimizers], **options)
            assert (process(), objects(model, optimizer)) == before
        if first is not None:
            block(model, optimizer)
            optimizer.step()
        amp.reset()
        return [*values(model, optimizer), *[t.detach() for t in model.parameters()]]

    assert_same(train(True), train(False))


@pytest.mark.parametrize("models", [None, (nn.Linear(1, 1),), "model"])
def test_what_is_no_model_or_list(models):
    with pytest.raises(TypeError, match=NO_MODEL):
        amp.initialize(models, verbosity=0)
    with pytest.raises(TypeError, match=NO_OPTIMIZER):
        amp.initialize(nn.Linear(1, 1), "sgd", verbosity=0)


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
    model, optimizer = started(level, nn.Linear(2, 2))
    new = nn.Parameter(torch.zeros(2))
    before = objects(model, optimizer)
    for params in (model.weight, [new, new], (p for p in (new, model.bias))):
        with pytest.raises(ValueError, match="more than one parameter group.*weight once"):
            optimizer.add_param_group({"params": params})
        assert objects(model, optimizer) == before
    optimizer.add_param_group({"params": (p for p in (new,))})
    assert len(list(amp.master_params(optimizer))) == 3


def test_a_weight_beside_its_master_is_refused():
    model, optimizer = started("O2", nn.Linear(2, 2))
    optimizer.param_groups[0]["params"].append(model.weight)
    with pytest.raises(ValueError, match="or its float32 master"):
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
