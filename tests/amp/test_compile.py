"""A compiled model gives what the eager one gives, at every level, whatever the thread casts.

The back end is one that traces as compilers do, and compiles nothing.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

from apex import amp
from apex._compat import IS_2_13
from tests.amp.levels import assert_same
from tests.amp.training import scaled_backward, started

# Of Dynamo itself, in 2.9 where a graph breaks.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


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


def compiled(module):
    """In one graph; before torch 2.13 a change of autocast's state breaks it."""
    return torch.compile(module, backend="aot_eager", fullgraph=IS_2_13)


def evaluated(level):
    return started(level, Net())[0].eval(), torch.randn(4, 1, 4, 4)


def check(level, ambient):
    """A model of one level inside a parent of the thread's level."""
    model, x = evaluated(level)
    started(ambient, nn.Linear(1, 1))
    module = Parent(model)
    eager, traced = module(x), compiled(module)
    state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    assert_same(traced(x), eager)
    with torch.no_grad():
        assert_same(traced(x), eager)
        model.conv.weight.mul_(2)
        assert_same(traced(x), module(x))
    assert state == (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))


@pytest.mark.parametrize(
    ("level", "ambient"),
    [("O0", "O1"), ("O1", "O0"), ("O1", "O4"), ("O2", "O4"), ("O4", "O1")],
)
@pytest.mark.slow
def test_a_model_in_a_thread_of_another_level(level, ambient):
    check(level, ambient)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
@pytest.mark.slow
def test_training(level):
    def train(wrap):
        torch.manual_seed(0)
        model, optimizer = started(level, Net(), loss_scale=128.0)
        forward = wrap(model)
        losses = []
        for _ in range(3):
            y, s = forward(torch.randn(4, 1, 4, 4))
            loss = F.mse_loss(y, torch.ones_like(y)) + s.float().square().sum()
            scaled_backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *model.state_dict().values()]

    assert_same(train(compiled), train(lambda model: model))


class Batch:
    def __init__(self, x, mask):
        self.x, self.mask = x, mask

    def to(self, dtype):
        return Batch(self.x.to(dtype), self.mask.to(dtype))


@dataclasses.dataclass
class Masked:
    x: torch.Tensor
    mask: torch.Tensor


class Mean(nn.Linear):
    def forward(self, batch, *other):
        fields = batch if isinstance(batch, dict) else vars(batch)
        y = super().forward(fields["x"].masked_fill(fields["mask"], 0.0))
        return {"y": [y], "mean": y.mean()}


@pytest.mark.parametrize("kind", [dict, Masked, Batch])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_new_batch_of_the_same_shape_compiles_nothing(level, kind):
    """What the hooks trace may not look at the id of an input: each batch has another one."""
    model, optimizer = started(level, Mean(4, 2))
    counter = CompileCounter()
    model = torch.compile(nn.Sequential(model), backend=counter)  # whose hooks are traced
    kept = []  # so that no id is used again
    for _ in range(3):
        kept.append(kind(x=torch.randn(3, 4), mask=torch.rand(3, 4) > 0.5))
        scaled_backward(model(kept[-1])["y"][0].float().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert counter.frame_count == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_model_keeps_what_is_one_object(level):
    class Same(nn.Linear):
        def forward(self, batch, x):
            return super().forward(x) if batch[0] is x else None

    model = torch.compile(started(level, Same(2, 1))[0], backend="eager")
    for _ in range(2):
        x = torch.ones(3, 2)
        assert model([x, "text"], x) is not None


def test_a_compiled_step_with_its_loss_and_rules():
    amp.register_float_function(torch, "mm")
    amp.register_half_function(torch, "sigmoid")

    @amp.float_function
    def widened(x):
        return x * 3

    model, _ = started("O1", nn.Linear(4, 3))

    def forward(x):
        y = model(x)
        loss = F.cross_entropy(y, torch.tensor([0, 1, 2]))
        return y, loss, y.mm(y.t()), torch.mm(y, y.t()), torch.sigmoid(x), widened(y)

    x = torch.randn(3, 4)
    eager = forward(x)
    half, wide = torch.float16, torch.float32
    assert [t.dtype for t in eager] == [half, wide, half, wide, half, wide]
    assert_same(compiled(forward)(x), eager)


def test_torchs_own_autocast_compiled_keeps_its_meaning():
    def forward(x):
        with torch.autocast("cpu", dtype=torch.float16):
            return x.softmax(-1), F.gelu(x)

    started("O2", nn.Linear(1, 1))
    x = torch.rand(3, 4).half()
    eager = forward(x)
    assert eager[0].dtype == torch.float16
    assert_same(compiled(forward)(x), eager)


def test_a_model_compiled_before_initialize():
    model, x = Net().eval(), torch.randn(4, 1, 4, 4)
    traced = torch.compile(model, backend="eager")
    assert_same(traced(x), model(x))
    for level in ("O1", "O2", "O0", "O4"):
        started(level, model)
        assert_same(traced(x), model(x))
    amp.reset()
    assert_same(traced(x), model(x))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_initialize_takes_a_compiled_model(level):
    torch.manual_seed(0)
    model, _ = started(level, Net())
    torch.manual_seed(0)
    traced, _ = started(level, torch.compile(Net(), backend="eager"))
    model.eval()
    traced.eval()
    x = torch.randn(4, 1, 4, 4)
    for ambient in (level, "O0"):
        started(ambient, nn.Linear(1, 1))
        assert_same(traced(x), model(x))


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_export(level):
    model, x = evaluated(level)
    assert_same(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.skipif(not IS_2_13, reason="torch 2.9 breaks the graph of a forward")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.slow
def test_a_compiled_step_is_one_graph_and_amp_runs_as_it_is(level):
    graphs, ends, x = [], [], torch.randn(4, 1, 4, 4)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    for compiles in (False, True):
        torch.manual_seed(0)
        model, optimizer = started(level, Net())

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            scaled_backward(model(x)[0].float().square().mean(), optimizer)
            optimizer.step()

        step = torch.compile(step, backend=backend) if compiles else step
        for _ in range(3):
            step(x)
        ends.append([p.tolist() for p in amp.master_params(optimizer)])
    assert ends[0] == ends[1]
    assert len(graphs) == 1
