"""Recurrent layers and cells: 16-bit inside, whatever comes in; float32 weights and gradients."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from apex import amp
from apex.amp.casting import cpu_float16

HALF = {"O1": torch.float16, "O4": torch.bfloat16}
LAYERS = {
    "tanh": lambda **options: nn.RNN(4, 3, nonlinearity="tanh", **options),
    "relu": lambda **options: nn.RNN(4, 3, nonlinearity="relu", **options),
    "GRU": lambda **options: nn.GRU(4, 3, **options),
    "LSTM": lambda **options: nn.LSTM(4, 3, **options),
}
CELLS = {
    "tanh": lambda: nn.RNNCell(4, 3),
    "relu": lambda: nn.RNNCell(4, 3, nonlinearity="relu"),
    "GRU": lambda: nn.GRUCell(4, 3),
    "LSTM": lambda: nn.LSTMCell(4, 3),
}


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


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def run(module, x, *state):
    """Outputs, and the gradients of input and weights."""
    x = x.clone().requires_grad_()
    outputs = flat(module(pack_padded_sequence(x, [5, 2, 1]) if module.packed else x, *state))
    with amp.disable_casts():
        sum(output.float().square().sum() for output in outputs).backward()
    return outputs, x.grad, [p.grad for p in module.parameters()]


def check(module, x, level, *state):
    """Compare with a half copy of the module, which is given half input; at O4 with autocast."""
    dtype = HALF[level]
    cpu_float16.begin(dtype, ["cpu"])
    copied = copy.deepcopy(module)
    if level == "O4" and not autocast_raises(module):
        with torch.autocast("cpu", dtype):
            want, want_input, want_weights = run(copied, x, *state)
        dtype = want[0].dtype
    else:
        half = [s.to(dtype) for s in state]
        want, want_input, want_weights = run(copied.to(dtype), x.to(dtype), *half)
    model = amp.initialize(module, opt_level=level, verbosity=0)
    got, got_input, got_weights = run(model, x, *state)
    assert_same(got, want)
    assert got[0].dtype == dtype
    assert_same([got_input], [want_input.to(x.dtype)])
    assert_same(got_weights, [grad.float() for grad in want_weights])


def check_layer(kind, level, layers, bidirectional, packed, source, **options):
    module = LAYERS[kind](num_layers=layers, bidirectional=bidirectional, **options)
    module.packed = packed
    dtype = HALF[level] if source == "half" else torch.float32
    check(module, torch.randn(5, 3, 4).to(dtype), level)


def cases():
    booleans = (False, True)
    return itertools.product(LAYERS, HALF, (1, 2), booleans, booleans, ("float", "half"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "level", "layers", "bidirectional", "packed", "source"), list(cases())
)
def test_every_layer(kind, level, layers, bidirectional, packed, source):
    check_layer(kind, level, layers, bidirectional, packed, source)


@pytest.mark.parametrize(
    ("kind", "level", "layers", "bidirectional", "packed", "source"),
    list(cases())[::7],
)
def test_layer(kind, level, layers, bidirectional, packed, source):
    check_layer(kind, level, layers, bidirectional, packed, source)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("kind", CELLS)
def test_cell(kind, level, source):
    module = CELLS[kind]()
    module.packed = False
    check(module, torch.randn(3, 4).to(source), level)


@pytest.mark.parametrize("source", [torch.float32, torch.float16])
def test_hidden_state_of_either_type(source):
    module = nn.GRU(4, 3)
    module.packed = False
    check(module, torch.randn(5, 3, 4), "O1", torch.randn(1, 3, 3).to(source))
    cell = nn.GRUCell(4, 3)
    cell.packed = False
    check(cell, torch.randn(3, 4), "O1", torch.randn(3, 3).to(source))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")
@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(4, 6, proj_size=2),
        nn.LSTM(4, 3, 2, bias=False, batch_first=True, bidirectional=True),
        nn.GRU(4, 3, 2, bias=False),
    ],
    ids=["proj_size", "LSTM without bias", "GRU without bias"],
)
def test_other_shapes(module):
    module = copy.deepcopy(module)
    module.packed = False
    check(module, torch.randn(5, 3, 4), "O1")


def test_a_sequence_without_batch_dimension():
    module = nn.LSTM(4, 3)
    module.packed = False
    check(module, torch.randn(5, 4), "O1")


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


def test_unflattened_weights():
    module = nn.LSTM(4, 3, 2)
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    module.packed = False
    check(module, torch.randn(5, 3, 4), "O1")


class Tagger(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.recurrent = LAYERS[kind](num_layers=2, bidirectional=True)
        self.linear = nn.Linear(6, 2)

    def forward(self, x):
        return self.linear(self.recurrent(x)[0].mean(0))


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("kind", LAYERS)
def test_training(kind, level):
    model = Tagger(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(5, 16, 4)
    y = (x[:, :, 0].sum(0) > 0).long()
    losses = []
    for _ in range(25):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_compiled(kind, level):
    torch._dynamo.reset()
    model = amp.initialize(Tagger(kind), opt_level=level, verbosity=0)
    x = torch.randn(5, 3, 4)
    assert_same([torch.compile(model, backend="aot_eager")(x)], [model(x)])
