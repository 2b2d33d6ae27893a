"""The lines that ``verbosity=2`` speaks, one for each tensor that is cast."""

import collections
import functools
import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apex import amp
from apex.amp import _speech
from tests.amp import levels
from tests.amp.training import scaled_backward, sgd, started

from .functions import calls, convert

CALLS = calls()

TUTORIAL = {"Float->Half (conv2d)": 5, "Float->Half (linear)": 4, "Half->Float (log_softmax)": 1}


class Net(nn.Module):
    """The network of the tutorial: two convolutions, two linear layers, ``log_softmax``."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.view(-1, 320)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


@pytest.fixture
def lines(capsys, monkeypatch):
    """A function that returns the cast lines since the last call, counted."""
    monkeypatch.setattr(_speech, "logger", logging.Logger("apex.amp"))  # without pytest's handlers

    def read():
        spoken = capsys.readouterr().out.splitlines()
        return collections.Counter(line for line in spoken if "->" in line)

    return read


def iterate(model, optimizer):
    loss = F.nll_loss(model(torch.randn(2, 1, 28, 28)), torch.tensor([1, 2]))
    optimizer.zero_grad()
    scaled_backward(loss, optimizer)
    optimizer.step()
    return loss.detach()


def start(verbosity, level="O1"):
    return started(level, Net(), functools.partial(sgd, lr=0.01), verbosity)


def test_the_tutorials_network(lines):
    """In each iteration, in evaluation, and with the values that it has without a log."""
    torch.manual_seed(0)
    want = iterate(*start(1))
    torch.manual_seed(0)
    model, optimizer = start(2)
    lines()
    assert torch.equal(iterate(model, optimizer), want)
    assert lines() == TUTORIAL
    iterate(model, optimizer)
    assert lines() == TUTORIAL
    model.eval()
    for _ in range(2):
        with torch.no_grad():
            model(torch.randn(2, 1, 28, 28))
        assert lines() == TUTORIAL


@pytest.mark.parametrize(
    ("level", "verbosity"),
    [("O1", 0), ("O1", 1), ("O1", True), ("O1", 3), ("O0", 2), ("O2", 2), ("O5", 2)],
)
def test_silent_at_other_verbosities_and_at_levels_without_function_casts(lines, level, verbosity):
    iterate(*start(verbosity, level))
    assert not lines()


def test_recurrent_weights_are_spoken_of(lines):
    model = amp.initialize(nn.LSTM(2, 3), opt_level="O1", verbosity=2)
    lines()
    model(torch.randn(4, 1, 2))
    # input, two hidden states, four weights
    assert lines() == {"Float->Half (lstm)": 7}


def test_the_log_is_the_threads(lines):
    start(2)
    lines()
    thread = threading.Thread(target=levels.product)
    thread.start()
    thread.join()
    assert not lines()


def test_the_tutorials_network_in_bfloat16(lines):
    model, optimizer = start(2, "O4")
    layers = {"Float->BFloat16 (conv2d)": 5, "Float->BFloat16 (linear)": 4}
    for _ in range(2):
        iterate(model, optimizer)
        # log_softmax stays in 16 bits on a CPU, as under torch.autocast; the loss does not
        assert lines() == {**layers, "BFloat16->Float (nll_loss)": 1}


def test_the_log_in_bfloat16_is_true(lines):
    float_list, half_list = CALLS["float"], CALLS["half"]
    start(2, "O4")
    lines()
    for (space, name), args in {**float_list, **half_list}.items():
        if name == "__matmul__":  # Python calls matmul
            continue
        source = torch.bfloat16 if (space, name) in float_list else torch.float32
        result = getattr(space, name)(*convert(args, source))
        logged = any(f"({name})" in line for line in lines())
        is_cast = isinstance(result, torch.Tensor) and result.dtype != source
        assert logged == is_cast, (space, name)


def test_what_each_kind_of_cast_says(lines):
    amp.register_float_function(torch, "sigmoid")
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=2)
    x, half = torch.ones(2, 2), torch.ones(2, 2).half()

    @amp.half_function
    def own(a, b):
        return a + b

    cases = [
        (lambda: x @ half, {"Float->Half (matmul)": 1}),  # torch says matmul for both spellings
        (lambda: torch.mm(x, x), {"Float->Half (mm)": 2}),
        (lambda: half.mm(half), {}),
        (lambda: half.exp(), {"Half->Float (exp)": 1}),
        (lambda: x.exp(), {}),
        (lambda: half + x, {"Half->Float (add)": 1}),
        (lambda: half + half, {}),
        (lambda: torch.cat([half, x, half]), {"Half->Float (cat)": 2}),
        (lambda: torch.stack([half, half]), {}),
        (lambda: torch.sigmoid(half), {"Half->Float (sigmoid)": 1}),
        (lambda: own(x, b=x), {"Float->Half (own)": 2}),
        (lambda: x.double().exp(), {}),
        (lambda: torch.arange(2).sum(), {}),
        (lambda: F.gelu(half), {"Half->Float (gelu)": 1}),
    ]
    lines()
    for call, spoken in cases:
        call()
        assert lines() == spoken
    with amp.disable_casts():
        torch.mm(x, x)
        own(x, x)
        half.exp()
    assert not lines()


def test_the_log_ends_with_its_casts(lines):
    start(2)
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=1)
    lines()
    torch.ones(2, 2).mm(torch.ones(2, 2))
    assert not lines()
    start(2)
    amp.reset()
    lines()
    Net()(torch.randn(2, 1, 28, 28))
    assert not lines()


def test_the_log_leaves_other_modes_in_place(lines):
    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 2)
    start(2)
    with Counting() as counting:
        torch.mm(x, x)
        amp.reset()
        torch.mm(x, x)
        assert counting.calls == 2
    torch.mm(x, x)
    assert counting.calls == 2
