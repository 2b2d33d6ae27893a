"""Networks at the levels of amp, and in 16 bits without it."""

import copy

import pytest
import torch
from torch import nn

from apex import RNN, amp
from tests.tolerance import RECURRENT_16_BIT, assert_close_in_rms

SEQ, BATCH, INPUT, HIDDEN = 5, 8, 4, 6
NAMES = ["LSTM", "GRU", "ReLU", "Tanh", "mLSTM"]
MAYBE_LSTM = ["LSTM"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else []
STATES = {  # what the network computes in
    "O0": torch.float32,
    "O1": torch.float16,
    "O2": torch.float16,
    "O3": torch.float16,
    "O4": torch.bfloat16,
    "O5": torch.bfloat16,
}
OUTPUTS = STATES | dict.fromkeys(("O2", "O3", "O5"), torch.float32)  # models that amp casts


@pytest.fixture(autouse=True)
def _reset():
    yield
    amp.reset()


class Tagger(nn.Module):
    def __init__(self, name, **options):
        super().__init__()
        self.recurrent = getattr(RNN, name)(INPUT, HIDDEN, 2, **options)
        width = (1 + options.get("bidirectional", False)) * options.get("output_size", HIDDEN)
        self.linear = nn.Linear(width, 2)

    def forward(self, x):
        output, hidden = self.recurrent(x)
        return self.linear(output), output, hidden


def train(model, optimizer, x, y, level):
    """Two steps with an evaluation between them, each of which goes on with the states before."""
    results = []
    for part, target in zip(x, y, strict=True):
        logits, output, hidden = model(part)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        optimizer.zero_grad()
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        model.recurrent.detach_hidden()
        model.eval()
        with torch.no_grad():
            evaluated = model(part)
        model.train()
        results += [logits, output, *hidden, evaluated[0], evaluated[1], *evaluated[2]]
    return results


OPTIONS = [(name, {}) for name in NAMES]
OPTIONS += [("LSTM", {"output_size": 2}), ("Tanh", {"output_size": 2}), ("GRU", {"bias": False})]
OPTIONS += [("LSTM", {"bidirectional": True}), ("mLSTM", {"bidirectional": True})]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")
@pytest.mark.parametrize("level", STATES)
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_two_steps_at_every_level(name, options, level):
    model = Tagger(name, **options)
    exact = copy.deepcopy(model).double()
    x, y = torch.randn(2, SEQ, BATCH, INPUT), torch.randint(2, (2, SEQ, BATCH))
    optimizer = torch.optim.SGD(exact.parameters(), lr=0.5)
    want = train(exact, optimizer, x.double(), y, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0
    )
    got = train(model, optimizer, x, y, level)
    if level != "O4":  # its states have torch.autocast's types
        assert {tensor.dtype for tensor in got} == {OUTPUTS[level]}
        cells = [module for module in model.modules() if isinstance(module, RNN.models.RNNCell)]
        assert {state.dtype for cell in cells for state in cell.hidden} == {STATES[level]}
    for one, other in zip(got, want, strict=True):
        eps = torch.finfo(STATES[level]).eps / torch.finfo(one.dtype).eps
        assert_close_in_rms(one, other, RECURRENT_16_BIT * eps)
    for one, other in zip(amp.master_params(optimizer), exact.parameters(), strict=True):
        eps = torch.finfo(STATES[level]).eps / torch.finfo(one.dtype).eps
        assert_close_in_rms(one, other, RECURRENT_16_BIT * eps)


@pytest.mark.onednn
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_half_network_without_amp(name, dtype):
    """Cast between two forwards, without a reset."""
    network = getattr(RNN, name)(INPUT, HIDDEN, 2)
    exact = copy.deepcopy(network).to(dtype).double()
    x = torch.randn(2, SEQ, BATCH, INPUT).to(dtype)
    network(x[0].float())
    exact(x[0].double())
    network.detach_hidden()
    exact.detach_hidden()
    network.to(dtype)
    results = [module(part) for module, part in ((network, x[1]), (exact, x[1].double()))]
    for output, _ in results:
        output.sum().backward()
    (output, hidden), (want, states) = results
    pairs = [(output, want), *zip(hidden, states, strict=True)]
    if name != "ReLU":  # its slope jumps where rounding changes a sign
        parameters = zip(network.parameters(), exact.parameters(), strict=True)
        pairs += [(one.grad, other.grad) for one, other in parameters]
    for one, other in pairs:
        assert one.dtype == dtype
        assert_close_in_rms(one, other, RECURRENT_16_BIT)


def both_ways(network, x):
    """Output and last states, from torch's whole sequences and from the cells."""
    for collect in (False, True):
        network.reset_hidden(BATCH)
        output, hidden = network(x, collect_hidden=collect)
        yield [output, *(state[-1] if collect else state for state in hidden)]


@pytest.mark.onednn
@pytest.mark.parametrize("name", NAMES)
def test_both_ways_to_run_a_layer_have_one_dtype(name):
    network = amp.initialize(getattr(RNN, name)(INPUT, HIDDEN, 2), opt_level="O1", verbosity=0)
    for one, other in zip(*both_ways(network, torch.randn(SEQ, BATCH, INPUT)), strict=True):
        assert (one.dtype, other.dtype) == (torch.float16, torch.float16)
        assert_close_in_rms(one, other.double(), RECURRENT_16_BIT)


# torch.autocast raises on an LSTM where the CPU has no bfloat16 instructions
@pytest.mark.onednn
@pytest.mark.parametrize("name", [name for name in NAMES if name != "LSTM"] + MAYBE_LSTM)
def test_o4_computes_as_torchs_autocast(name):
    network, x = getattr(RNN, name)(INPUT, HIDDEN, 2), torch.randn(SEQ, BATCH, INPUT)
    with torch.autocast("cpu", torch.bfloat16):
        want = list(both_ways(network, x))
    network = amp.initialize(network, opt_level="O4", verbosity=0)
    for results, wanted in zip(both_ways(network, x), want, strict=True):
        for one, other in zip(results, wanted, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_networks_built_while_cells_of_torch_are_registered():
    """A registration replaces ``torch.lstm_cell``; networks know it all the same."""
    amp.register_float_function(torch, "lstm_cell")
    amp.register_float_function(torch, "gru_cell")
    amp.init()
    with pytest.raises(ValueError, match="GRU's output_size is 2"):
        RNN.GRU(INPUT, HIDDEN, 1, output_size=2)
    network = RNN.LSTM(INPUT, HIDDEN, 1, output_size=2)
    output, _ = network(torch.randn(SEQ, BATCH, INPUT), collect_hidden=True)
    assert output.shape == (SEQ, BATCH, 2)
