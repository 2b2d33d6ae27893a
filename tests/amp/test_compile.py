"""A compiled model gives what the eager one gives, at every level, whatever the thread casts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import _compat, amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)
        self.linear = nn.Linear(12, 5)

    def forward(self, x):
        y = F.gelu(self.norm(self.conv(x))).flatten(1)
        y = self.linear(y)
        return y, F.softmax(y, -1)


class Parent(nn.Module):
    """Casts as the thread does, around a model that casts as its level does."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        before = x.flatten(1).mm(x.flatten(1).t())
        y, s = self.model(x)
        return y, s, before, F.softmax(before, -1), x.flatten(1).mm(x.flatten(1).t())


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def start(level, model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def _untraced(function):
    def call(*args):
        assert not torch.compiler.is_dynamo_compiling()
        return function(*args)

    return call


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def check(level, ambient, inside, fullgraph):
    model, _ = start(level, Net())
    if ambient is not None:
        start(ambient, nn.Linear(1, 1))
    model.eval()
    x = torch.randn(4, 1, 4, 4)
    module = Parent(model) if inside else model
    eager = module(x)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=fullgraph)
    state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    assert_same(compiled(x), eager)
    with torch.no_grad():
        assert_same(compiled(x), eager)
        model.conv.weight.mul_(2)
        assert_same(compiled(x), module(x))
    assert state == (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_own_thread(level, inside):
    check(level, None, inside, fullgraph=True)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("level", "ambient"), [("O0", "O1"), ("O1", "O0"), ("O2", "O4"), ("O4", "O1"), ("O1", "O4")]
)
def test_thread_of_another_level(level, ambient, inside):
    check(level, ambient, inside, fullgraph=True)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_dynamo_that_does_not_trace_set_autocast_enabled(level, monkeypatch):
    monkeypatch.setattr(_compat, "TRACES_SET_AUTOCAST", False)
    monkeypatch.setattr(torch, "set_autocast_enabled", _untraced(torch.set_autocast_enabled))
    check(level, "O4", inside=True, fullgraph=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("ambient", [None, "O0", "O1", "O2", "O4"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_in_every_thread(level, ambient, inside, fullgraph):
    check(level, ambient, inside, fullgraph)


@pytest.mark.parametrize("level", LEVELS)
def test_training(level):
    def train(wrap):
        torch.manual_seed(0)
        model, optimizer = start(level, Net(), loss_scale=128.0)
        forward = wrap(model)
        losses = []
        for _ in range(3):
            y, s = forward(torch.randn(4, 1, 4, 4))
            loss = F.mse_loss(y, torch.ones_like(y)) + s.float().square().sum()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *model.state_dict().values()]

    compiled = train(lambda model: torch.compile(model, backend="aot_eager", fullgraph=True))
    assert_same(compiled, train(lambda model: model))


def test_a_compiled_step_with_its_loss_and_rules():
    amp.register_float_function(torch, "mm")
    amp.register_half_function(torch, "sigmoid")

    @amp.float_function
    def widened(x):
        return x * 3

    model, _ = start("O1", nn.Linear(4, 3))

    def forward(x):
        y = model(x)
        loss = F.cross_entropy(y, torch.tensor([0, 1, 2]))
        return y, loss, y.mm(y.t()), torch.mm(y, y.t()), torch.sigmoid(x), widened(y)

    x = torch.randn(3, 4)
    eager = forward(x)
    half, wide = torch.float16, torch.float32
    assert [t.dtype for t in eager] == [half, wide, half, wide, half, wide]
    assert_same(torch.compile(forward, backend="aot_eager", fullgraph=True)(x), eager)


def test_torchs_own_autocast_compiled_keeps_its_meaning():
    def forward(x):
        with torch.autocast("cpu", dtype=torch.float16):
            return x.softmax(-1), F.gelu(x)

    start("O2", nn.Linear(1, 1))
    x = torch.rand(3, 4).half()
    eager = forward(x)
    assert eager[0].dtype == torch.float16
    assert_same(torch.compile(forward, backend="aot_eager", fullgraph=True)(x), eager)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_compiled_before_initialize(level):
    model = Net()
    model.eval()
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(4, 1, 4, 4)
    assert_same(compiled(x), model(x))
    for each in (level, "O2", "O0"):
        start(each, model)
        assert_same(compiled(x), model(x))
    amp.reset()
    assert_same(compiled(x), model(x))


@pytest.mark.parametrize("level", LEVELS)
def test_initialize_takes_a_compiled_model(level):
    torch.manual_seed(0)
    model, _ = start(level, Net())
    torch.manual_seed(0)
    compiled, _ = start(level, torch.compile(Net(), backend="aot_eager"))
    model.eval()
    compiled.eval()
    x = torch.randn(4, 1, 4, 4)
    for ambient in (level, "O1" if level != "O1" else "O0"):
        start(ambient, nn.Linear(1, 1))
        assert_same(compiled(x), model(x))


@pytest.mark.parametrize("level", LEVELS)
def test_export(level):
    model, _ = start(level, Net())
    model.eval()
    x = torch.randn(4, 1, 4, 4)
    exported = torch.export.export(model, (x,)).module()
    assert_same(exported(x), model(x))
