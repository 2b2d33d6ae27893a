"""Recurrent layers and cells: 16-bit inside, whatever comes in; float32 weights and gradients."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from apex import amp
from apex.amp.casting import cpu_float16
from tests.amp.levels import HALF, assert_same, cast, train_step
from tests.amp.training import sgd, started


@pytest.mark.onednn
@pytest.mark.parametrize(
    ("kind", "level", "source", "options", "packed"),
    [
        ("tanh", "O1", torch.float32, {"bidirectional": True}, True),
        ("tanh", "O4", torch.bfloat16, {"num_layers": 2}, False),
        ("relu", "O1", torch.float16, {"num_layers": 2}, False),
        ("relu", "O4", torch.float32, {"bidirectional": True}, True),
        ("GRU", "O1", torch.float32, {"num_layers": 2, "bidirectional": True}, False),
        ("GRU", "O1", torch.float16, {"bias": False, "num_layers": 2}, True),
        ("GRU", "O4", torch.bfloat16, {}, True),
        ("LSTM", "O1", torch.float32, {"num_layers": 2}, True),
        ("LSTM", "O1", torch.float16, {"bidirectional": True}, False),
        ("LSTM", "O4", torch.float32, {"num_layers": 2}, False),
    ],
)
def test_layer(kind, level, source, options, packed):
    check(LAYERS[kind](4, 3, **options), torch.randn(5, 3, 4).to(source), level, packed=packed)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")
@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"proj_size": 2}, (5, 3, 4)),
        ({"num_layers": 2, "bias": False, "batch_first": True, "bidirectional": True}, (5, 3, 4)),
        ({}, (5, 4)),
    ],
    ids=["proj_size", "without bias", "without batch"],
)
def test_other_shapes(options, shape):
    check(nn.LSTM(4, 6, **options), torch.randn(*shape), "O1")


def test_unflattened_weights():
    module = nn.LSTM(4, 3, 2)
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    check(module, torch.randn(5, 3, 4), "O1")


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_reset_gives_flat_weights_back(level, monkeypatch):
    """As ``initialize`` makes them; else cuDNN warns, and copies them in each forward."""
    flattened = []
    monkeypatch.setattr(
        nn.RNNBase,
        "flatten_parameters",
        lambda layer: flattened.append([(p.data_ptr(), p.dtype) for p in layer.parameters()]),
    )
    model = nn.ModuleDict({"one": nn.LSTM(4, 3, 2), "other": Last("GRU")})
    amp.initialize(model, opt_level=level, verbosity=0)
    flattened.clear()
    amp.reset()
    layers = model["one"], model["other"].recurrent
    found = [[(p.data_ptr(), torch.float32) for p in layer.parameters()] for layer in layers]
    assert flattened == found


class Last(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.recurrent = LAYERS[kind](4, 3, num_layers=2, bidirectional=True)

    def forward(self, x):
        return self.recurrent(x)[0][-1]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_training(kind, level):
    model, optimizer = started(level, Last(kind), functools.partial(sgd, lr=0.01), loss_scale=128.0)
    x = torch.randn(5, 16, 4)
    before = model(x).float().square().sum().item()
    for _ in range(10):
        train_step(model, optimizer, x)
    assert model(x).float().square().sum().item() < 0.5 * before


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
@pytest.mark.slow
def test_compiled(kind):
    torch._dynamo.reset()
    model, x = cast("O1", Last(kind)), torch.randn(5, 3, 4)
    assert_same([torch.compile(model, backend="aot_eager")(x)], [model(x)])


RELU = functools.partial(nn.RNN, nonlinearity="relu")
RELU_CELL = functools.partial(nn.RNNCell, nonlinearity="relu")
LAYERS = {"tanh": nn.RNN, "relu": RELU, "GRU": nn.GRU, "LSTM": nn.LSTM}
CELLS = {"tanh": nn.RNNCell, "relu": RELU_CELL, "GRU": nn.GRUCell, "LSTM": nn.LSTMCell}


def autocast_raises(module):
    """On an LSTM in bfloat16, where the CPU has no such instructions; O4 casts it by itself."""
    return isinstance(module, nn.LSTM) and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def flat(result):
    """The tensors in what a layer or cell returns."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, PackedSequence):
        return [result.data]
    return [tensor for part in result for tensor in flat(part)]


def run(module, x, *state, packed):
    """Outputs, and the gradients of input and weights."""
    x = x.clone().requires_grad_()
    outputs = flat(module(pack_padded_sequence(x, [5, 2, 1]) if packed else x, *state))
    with amp.disable_casts():
        sum(output.float().square().sum() for output in outputs).backward()
    return outputs, x.grad, [p.grad for p in module.parameters()]


def check(module, x, level, *state, packed=False):
    """Compare with a half copy of the module, which is given half input; at O4 with autocast."""
    dtype = HALF[level]
    cpu_float16.begin(dtype, ["cpu"])
    copied = copy.deepcopy(module)
    if level == "O4" and not autocast_raises(module):
        with torch.autocast("cpu", dtype):
            want, want_input, want_weights = run(copied, x, *state, packed=packed)
        dtype = want[0].dtype
    else:
        half = [s.to(dtype) for s in state]
        want, want_input, want_weights = run(copied.to(dtype), x.to(dtype), *half, packed=packed)
    model = amp.initialize(module, opt_level=level, verbosity=0)
    got, got_input, got_weights = run(model, x, *state, packed=packed)
    assert_same(got, want)
    assert got[0].dtype == dtype
    assert_same([got_input], [want_input.to(x.dtype)])
    assert_same(got_weights, [grad.float() for grad in want_weights])


@pytest.mark.onednn
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("kind", CELLS)
def test_cell(kind, level, source):
    check(CELLS[kind](4, 3), torch.randn(3, 4).to(source), level)


@pytest.mark.parametrize("source", [torch.float32, torch.float16])
def test_hidden_state_of_either_type(source):
    check(nn.GRU(4, 3), torch.randn(5, 3, 4), "O1", torch.randn(1, 3, 3).to(source))
    check(nn.GRUCell(4, 3), torch.randn(3, 4), "O1", torch.randn(3, 3).to(source))


def test_dropout_between_layers_follows_the_seed():
    cpu_float16.begin(torch.float16, ["cpu"])
    module = nn.LSTM(4, 3, 2, dropout=0.5)
    half, x = copy.deepcopy(module).half(), torch.ones(5, 3, 4)
    torch.manual_seed(7)
    want = half(x.half())[0]
    model = amp.initialize(module, opt_level="O1", verbosity=0)
    torch.manual_seed(7)
    assert_same([model(x)[0]], [want])


def test_a_float64_layer_is_left_alone():
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    module, x = nn.GRU(4, 3).double(), torch.randn(5, 3, 4).double()
    got = module(x)[0]
    with amp.disable_casts():
        assert_same([got], [module(x)[0]])
