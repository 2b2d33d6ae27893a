"""The five networks beside torch's layers and, for mLSTM, beside a definition."""

import pytest
import torch
from torch import nn

from apex import RNN
from apex.RNN.models import toRNNBackend
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN
from tests.tolerance import RECURRENT, assert_close_to_largest, each

# Torch says so once in a process, and computes the same in another way.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")

SEQ, BATCH, INPUT, HIDDEN = 5, 3, 4, 6
TORCHS = {
    "LSTM": lambda **options: nn.LSTM(INPUT, HIDDEN, **options),
    "GRU": lambda **options: nn.GRU(INPUT, HIDDEN, **options),
    "ReLU": lambda **options: nn.RNN(INPUT, HIDDEN, nonlinearity="relu", **options),
    "Tanh": lambda **options: nn.RNN(INPUT, HIDDEN, **options),
}
NAMES = [*TORCHS, "mLSTM"]
ATTRIBUTES = {"weight_ih": "w_ih", "weight_hh": "w_hh", "bias_ih": "b_ih", "bias_hh": "b_hh"}
ATTRIBUTES["weight_hr"] = "w_ho"


def build(name, **options):
    return getattr(RNN, name)(INPUT, HIDDEN, **{"num_layers": 2, **options}).double()


def copied(name, network, **options):
    """Torch's layer with the weights of a stack, and the pairs of their parameters."""
    layer = TORCHS[name](**{"num_layers": network.nLayers, **options}).double()
    pairs = []
    for key, parameter in layer.named_parameters():
        attribute, _, number = key.rpartition("_l")
        own = getattr(network.rnns[int(number)], ATTRIBUTES[attribute])
        parameter.data.copy_(own.data)
        pairs.append((own, parameter))
    assert len(pairs) == len(list(network.parameters()))
    return layer, pairs


def states(result):
    return result if isinstance(result, tuple) else (result,)


CASES = [
    ("LSTM", {}),
    ("LSTM", {"bias": False, "num_layers": 1}),
    ("LSTM", {"output_size": 2}),
    ("GRU", {}),
    ("GRU", {"bias": False}),
    ("ReLU", {}),
    ("ReLU", {"bias": False}),
    ("Tanh", {"num_layers": 3}),
]


@pytest.mark.onednn
@pytest.mark.parametrize("collect", [False, True], ids=["whole", "by step"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_computes_what_torch_does(name, options, collect):
    """Over two forwards: the second begins with the states of the first."""
    network = build(name, **options)
    torchs = {"num_layers": network.nLayers, "bias": options.get("bias", True)}
    if "output_size" in options:
        torchs["proj_size"] = options["output_size"]
    layer, pairs = copied(name, network, **torchs)
    x = torch.randn(2, SEQ, BATCH, INPUT, dtype=torch.float64, requires_grad=True)
    ours = [network(part, collect) for part in x]
    hidden = [[state[-1] if collect else state for state in result[1]] for result in ours]
    same = x.detach().clone().requires_grad_()
    first, state = layer(same[0])
    second, last = layer(same[1], state)
    got = [ours[0][0], *hidden[0], ours[1][0], *hidden[1]]
    want = [first, *states(state), second, *states(last)]
    each(assert_close_to_largest, got, want, RECURRENT)
    weights = [torch.randn_like(tensor) for tensor in got]
    torch.autograd.backward(got, weights)
    torch.autograd.backward(want, weights)
    for one, other in [(x, same), *pairs]:
        assert_close_to_largest(one.grad, other.grad, RECURRENT)


def lstm(gates, c):
    i, f, g, o = gates.split(HIDDEN, dim=1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def mlstm(x, h, c, p):
    """One layer of Krause et al., arXiv:1609.07959, equations 8 to 14 and Apex's projection."""
    outputs = []
    for step in x:
        m = (step @ p["w_mih"].T) * (h @ p["w_mhh"].T)
        gates = step @ p["w_ih"].T + m @ p["w_hh"].T + p.get("b_ih", 0) + p.get("b_hh", 0)
        h, c = lstm(gates, c)
        if "w_ho" in p:
            h = h @ p["w_ho"].T
        outputs.append(h)
    return torch.stack(outputs), h, c


@pytest.mark.onednn
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"output_size": 2}, {"output_size": 8}])
def test_mlstm_computes_its_definition(options):
    network = build("mLSTM", **options)
    copies = {key: p.detach().clone().requires_grad_() for key, p in network.named_parameters()}
    x = torch.randn(2, SEQ, BATCH, INPUT, dtype=torch.float64, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    width = options.get("output_size", HIDDEN)
    state = [(torch.zeros(BATCH, width).double(), torch.zeros(BATCH, HIDDEN).double())] * 2
    got, want = [], []
    for part, y in zip(x, same, strict=True):
        output, hidden = network(part)
        for number in range(2):
            prefix = f"rnns.{number}."
            p = {k.removeprefix(prefix): v for k, v in copies.items() if k.startswith(prefix)}
            y, *state[number] = mlstm(y, *state[number], p)
        got += [output, *hidden]
        want += [y, *(torch.stack(layers) for layers in zip(*state, strict=True))]
    weights = [torch.randn_like(tensor) for tensor in got]
    torch.autograd.backward(got, weights)
    torch.autograd.backward(want, weights)
    pairs = [(p.grad, copies[key].grad) for key, p in network.named_parameters()]
    for one, other in [*zip(got, want, strict=True), (x.grad, same.grad), *pairs]:
        assert_close_to_largest(one, other, RECURRENT)


def test_projections_that_torch_has_not():
    """The projected state is what recurs, and may be wider than the hidden one."""
    plain = {"ReLU": lambda gates, c: (gates.relu(), c), "Tanh": lambda gates, c: (gates.tanh(), c)}
    for name, function in {**plain, "LSTM": lstm}.items():
        for size in (2, 8):
            network = build(name, num_layers=1, output_size=size)
            cell = network.rnns[0]
            x = torch.randn(SEQ, BATCH, INPUT, dtype=torch.float64)
            h, c, want = torch.zeros(BATCH, size).double(), 0, []
            for step in x:
                gates = step @ cell.w_ih.T + cell.b_ih + h @ cell.w_hh.T + cell.b_hh
                h, c = function(gates, c)
                h = h @ cell.w_ho.T
                want.append(h)
            output, hidden = network(x)
            assert_close_to_largest(output, torch.stack(want), RECURRENT)
            assert torch.equal(hidden[0][0], output[-1])


def test_a_gru_has_no_projection():
    with pytest.raises(RuntimeError, match="GRU's output_size is 2 .* torch.nn.Linear"):
        RNN.GRU(INPUT, HIDDEN, 1, output_size=2)
    assert RNN.GRU(INPUT, HIDDEN, 1, output_size=HIDDEN).rnns[0].w_ho is None


@pytest.mark.parametrize("name", NAMES)
def test_parameters_have_the_names_and_shapes_of_old_files(name):
    gates = {"LSTM": 4, "mLSTM": 4, "GRU": 3}.get(name, 1) * HIDDEN
    out = HIDDEN if name == "GRU" else 2
    network = getattr(RNN, name)(INPUT, HIDDEN, 2, output_size=out)
    want = {}
    for number, width in enumerate((INPUT, out)):
        shapes = {"w_ih": (gates, width), "w_hh": (gates, out)}
        if out != HIDDEN:
            shapes["w_ho"] = (out, HIDDEN)
        shapes |= {"b_ih": (gates,), "b_hh": (gates,)}
        if name == "mLSTM":
            shapes |= {"w_mih": (out, width), "w_mhh": (out, out)}
        want |= {f"rnns.{number}.{key}": shape for key, shape in shapes.items()}
    found = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    assert list(found.items()) == list(want.items())  # in this order, which optimizers number
    assert all(p.abs().max() <= HIDDEN**-0.5 for p in network.parameters())
    assert all(p.unique().numel() > 1 for p in network.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_batch_first(name):
    """The original took the argument and ignored it."""
    network = build(name, batch_first=True, bidirectional=True)
    plain = build(name, bidirectional=True)
    plain.load_state_dict(network.state_dict())
    x = torch.randn(SEQ, BATCH, INPUT, dtype=torch.float64)
    for collect in (False, True):
        got, hidden = network(x.transpose(0, 1), collect)
        want, same = plain(x, collect)
        assert torch.equal(got.transpose(0, 1), want)
        assert all(torch.equal(one, other) for one, other in zip(hidden, same, strict=True))


@pytest.mark.parametrize("name", TORCHS)
def test_dropout_between_layers(name):
    """The original took the argument and ignored it. Same seed, same numbers as torch's layer."""
    network = build(name, num_layers=3, dropout=0.5)
    layer, _ = copied(name, network, dropout=0.5)
    x = torch.randn(SEQ, BATCH, INPUT, dtype=torch.float64)
    for training in (True, False):
        network.train(training)
        layer.train(training)
        torch.manual_seed(1)
        want = layer(x)[0]
        for collect in (False, True):  # step by step, too
            network.reset_hidden(BATCH)
            torch.manual_seed(1)
            assert_close_to_largest(network(x, collect)[0], want, RECURRENT)


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_by_position(name):
    out = HIDDEN if name == "GRU" else 2
    network = getattr(RNN, name)(INPUT, HIDDEN, 2, False, True, 0.25, True, out)
    assert type(network) is bidirectionalRNN
    for stack in network.rnns:
        assert (stack.nLayers, stack.batch_first, stack.dropout) == (2, True, 0.25)
        for cell in stack.rnns:
            assert (cell.b_ih, cell.b_hh, cell.output_size) == (None, None, out)
    assert type(getattr(RNN, name)(INPUT, HIDDEN, 2)) is stackedRNN
    cell = RNNCell(1, INPUT, HIDDEN, torch.rnn_tanh_cell, 1)
    assert toRNNBackend(cell, 2, False, 0.5).rnns[0] is cell
    with pytest.raises(TypeError, match="num_layers"):  # no default, as in the original
        getattr(RNN, name)(INPUT, HIDDEN)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_layers": 0}, "num_layers is 0; pass 1 or more"),
        ({"dropout": 1.5}, "dropout is 1.5; pass a probability"),
        ({"dropout": -0.5}, "dropout is -0.5; pass a probability"),
        ({"output_size": 0}, "output_size is 0; pass 1 or more"),
    ],
)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_numbers_out_of_range(options, text, bidirectional):
    with pytest.raises(ValueError, match=text):
        build("LSTM", bidirectional=bidirectional, **options)
    with pytest.raises(ValueError, match="hidden_size is 0"):
        RNN.LSTM(INPUT, 0, 1)
    with pytest.raises(ValueError, match="input_size is -1"):
        RNN.LSTM(-1, HIDDEN, 1)
