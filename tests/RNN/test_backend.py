"""Stacks and pairs of stacks: what they return, how layers are run, state dicts, errors."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import RNN
from apex.RNN import _cell, models
from apex.RNN.cells import mLSTMRNNCell
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN
from tests.tolerance import RECURRENT, assert_close_to_largest

SEQ, BATCH, INPUT, HIDDEN, LAYERS = 5, 3, 4, 6, 2
LAYERS_OF = _cell._TORCH_LAYERS
NAMES = ["LSTM", "GRU", "ReLU", "Tanh", "mLSTM"]


def build(name, **options):
    network = getattr(RNN, name)(INPUT, HIDDEN, LAYERS, **options)
    return network.double()


def sequence(seq=SEQ, batch=BATCH):
    return torch.randn(seq, batch, INPUT, dtype=torch.float64)


def pairs(left, right):
    """The tensors of equal tuples and lists, two by two."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        return [(left, right)]
    return [pair for two in zip(left, right, strict=True) for pair in pairs(*two)]


def assert_equal(left, right):
    assert all(torch.equal(*pair) for pair in pairs(left, right))


def assert_close(left, right):
    """What is computed from the same numbers in another way."""
    for pair in pairs(left, right):
        assert_close_to_largest(*pair, RECURRENT)


def lstm(*sizes, output_size=None):
    return RNNCell(4, *sizes, torch.lstm_cell, 2, True, output_size)


def widths(name, output_size):
    return [output_size or HIDDEN, HIDDEN][: 2 if "LSTM" in name else 1]


@pytest.mark.parametrize("name", NAMES)
def test_shapes(name):
    """The documented ones; the original returned lists, and from bidirectional networks nothing."""
    size = None if name == "GRU" else 2
    network, pair = (build(name, output_size=size, bidirectional=both) for both in (False, True))
    x, out = sequence(), size or HIDDEN
    for module, twice in ((network, 1), (pair, 2)):
        output, hidden = module(x)
        assert isinstance(hidden, tuple)
        assert output.shape == (SEQ, BATCH, twice * out)
        shapes = [tuple(state.shape) for state in hidden]
        assert shapes == [(LAYERS, BATCH, twice * width) for width in widths(name, size)]
        output, hidden = module(x, collect_hidden=True)
        assert output.shape == (SEQ, BATCH, twice * out)
        shapes = [tuple(state.shape) for state in hidden]
        assert shapes == [(SEQ, LAYERS, BATCH, twice * width) for width in widths(name, size)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reverse", [False, True])
def test_the_returned_states_are_the_final_and_the_collected_ones(name, reverse):
    """In reverse the original returned the states after the first step that it processed."""
    network, x = build(name), sequence()
    output, hidden = network(x, reverse=reverse)
    stored = [torch.stack(states) for states in zip(*(c.hidden for c in network.rnns), strict=True)]
    assert_equal(list(hidden), stored)
    last = 0 if reverse else -1
    assert torch.equal(hidden[0][-1], output[last])
    assert not torch.equal(output[0], output[-1])
    network.reset_hidden(BATCH)
    if reverse:  # it reads the sequence from its end
        assert_close(output, network(x.flip(0))[0].flip(0))
        network.reset_hidden(BATCH)
    again, collected = network(x, collect_hidden=True, reverse=reverse)
    assert_close_to_largest(again, output, RECURRENT)
    assert torch.equal(collected[0][:, -1], again)  # step by step in the order of time
    for state, steps in zip(hidden, collected, strict=True):
        assert_close_to_largest(steps[last], state, RECURRENT)


@pytest.mark.parametrize("collect", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_bidirectional_is_two_stacks(name, collect):
    """The original raised a TypeError at every forward."""
    network, x = build(name, bidirectional=True), sequence()
    assert network.rnns == [network.fwd, network.bckwrd]
    stacks = copy.deepcopy(network.rnns)
    for _ in range(2):  # both directions carry their states
        output, hidden = network(x, collect)
        (ahead, first), (back, second) = (
            stack(x, collect, reverse) for stack, reverse in zip(stacks, (False, True), strict=True)
        )
        assert torch.equal(output, torch.cat([ahead, back], 2))
        assert_equal(hidden, tuple(torch.cat(p, -1) for p in zip(first, second, strict=True)))
    (output.sum() + sum(state.sum() for state in hidden)).backward()
    assert all(p.grad.any() for p in network.parameters())
    assert not torch.equal(network.fwd.rnns[0].w_ih, network.bckwrd.rnns[0].w_ih)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_in_two_forwards(name, bidirectional):
    """Truncated backpropagation: values go on, gradients end at detach_hidden."""
    network, x = build(name, bidirectional=bidirectional), sequence(2 * SEQ)
    if not bidirectional:
        whole = copy.deepcopy(network)(x)[0]
        parts = torch.cat([network(x[:SEQ])[0], network(x[SEQ:])[0]])
        assert_close_to_largest(parts, whole, RECURRENT)
    network.reset_hidden(BATCH)
    network(x[:SEQ])[0].sum().backward()
    fresh = copy.deepcopy(network)  # its states have no history
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        network(x[SEQ:])[0].sum().backward()
    for module in (network, fresh):
        module.reset_hidden(BATCH)
        module(x[:SEQ])
        module.zero_grad()
    network.detach_hidden()
    network(x[SEQ:])[0].sum().backward()
    fresh(x[SEQ:])[0].sum().backward()
    got, longer = (next(module.parameters()).grad for module in (network, fresh))
    assert got.any()
    assert not torch.equal(got, longer)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_states_of_all_layers(bidirectional):
    """``init_inference`` and ``detach_hidden`` raised AttributeError in the original."""
    network, x = build("LSTM", bidirectional=bidirectional), sequence()
    cells = [module for module in network.modules() if isinstance(module, RNNCell)]
    with pytest.raises(RuntimeError, match="no state yet"):
        network.detach_hidden()
    network.init_hidden(BATCH)
    states = [state for cell in cells for state in cell.hidden]
    assert all(torch.equal(state, torch.zeros(BATCH, HIDDEN).double()) for state in states)
    first = network(x)[0]
    network.detach_hidden()
    assert not any(state.requires_grad for cell in cells for state in cell.hidden)
    assert all(state.any() for cell in cells for state in cell.hidden)
    network.init_hidden(BATCH)
    assert not torch.equal(network(x)[0], first)
    for begin in (network.reset_hidden, network.init_inference):
        begin(BATCH)
        assert torch.equal(network(x)[0], first)
    network(sequence(batch=1))  # another batch size: zeros
    assert torch.equal(network(x)[0], first)
    before = [p.clone() for p in network.parameters()]
    for cell in cells:
        cell.reset_parameters(gain=100)  # not used
    network.reset_parameters()
    for one, other in zip(before, network.parameters(), strict=True):
        assert not torch.equal(one, other)
        assert other.abs().max() <= HIDDEN**-0.5


def test_a_list_of_cells():
    """Of several kinds, and of one width."""
    cells = [lstm(INPUT, 7), mLSTMRNNCell(7, 7, True), lstm(7, 7)]
    for given in (cells, tuple(cells)):
        stack = stackedRNN(given, 3)
        assert list(stack.rnns) == cells
    output, (h, c) = stack(torch.randn(SEQ, BATCH, INPUT))
    assert output.shape == (SEQ, BATCH, 7)
    assert h.shape == c.shape == (3, BATCH, 7)
    assert torch.equal(h[-1], output[-1])


def test_one_cell_for_all_layers():
    cell = lstm(INPUT, HIDDEN, output_size=2)
    stack = stackedRNN(cell, 3)
    assert stack.rnns[0] is cell
    assert [(c.input_size, c.output_size) for c in stack.rnns] == [(INPUT, 2), (2, 2), (2, 2)]
    assert not torch.equal(stack.rnns[1].w_ih, stack.rnns[2].w_ih)


@pytest.mark.parametrize("kind", [stackedRNN, bidirectionalRNN])
def test_what_is_no_list_of_cells(kind):
    same = lstm(INPUT, INPUT)
    with pytest.raises(AssertionError, match="has 1 cells and num_layers is 2"):
        kind([lstm(INPUT, HIDDEN)], 2)
    for given in (nn.LSTM(INPUT, HIDDEN), None, [lstm(INPUT, HIDDEN), nn.Linear(1, 1)]):
        with pytest.raises(RuntimeError, match=f"is a {type(given).__name__}; pass an RNNCell"):
            kind(given, 2)
    with pytest.raises(RuntimeError, match=r"input_size \[9\]. All cells must have"):
        kind([lstm(INPUT, HIDDEN), lstm(9, HIDDEN)], 2)
    gru = RNNCell(3, HIDDEN, HIDDEN, torch.gru_cell, 1)
    for other, widths in ((gru, (6, 6, 1)), (lstm(HIDDEN, 7), (7, 7, 2))):
        with pytest.raises(RuntimeError, match=re.escape(f"[(6, 6, 2), {widths}], and")):
            kind([lstm(INPUT, HIDDEN), other], 2)
    with pytest.raises(RuntimeError, match=r"twice; pass cell.new_like\(\)"):
        kind([same, same], 2)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", ["LSTM", "mLSTM"])
def test_inputs_that_do_not_fit(name, bidirectional):
    network = build(name, bidirectional=bidirectional)
    with pytest.raises(ValueError, match=r"shape \[3, 4\]; pass \[seq, batch, 4\]"):
        network(torch.zeros(BATCH, INPUT).double())
    with pytest.raises(ValueError, match=r"shape \[5, 3, 7\]; pass \[seq, batch, 4\]"):
        network(torch.zeros(SEQ, BATCH, 7).double())
    with pytest.raises(ValueError, match=r"no time step"):
        network(torch.zeros(0, BATCH, INPUT).double())
    with pytest.raises(ValueError, match="is torch.float32 and the parameters are torch.float64"):
        network(torch.zeros(SEQ, BATCH, INPUT))
    with pytest.raises(ValueError, match="is a PackedSequence; pass a tensor"):
        network(nn.utils.rnn.pack_sequence([torch.zeros(SEQ, INPUT).double()]))
    first = build(name, bidirectional=bidirectional, batch_first=True)
    with pytest.raises(ValueError, match=r"pass \[batch, seq, 4\]"):
        first(torch.zeros(BATCH, INPUT).double())


def test_sizes_of_one_and_none():
    for name in NAMES:
        network = build(name)
        assert network(sequence(1, 1))[0].shape == (1, 1, HIDDEN)
        assert network(sequence(SEQ, 0))[0].shape == (SEQ, 0, HIDDEN)


def test_hooks_of_cells_are_called_at_each_step():
    """As by torch.nn.utils.weight_norm, which recomputes a weight in one."""
    network, calls, x = build("LSTM"), [], sequence()
    want = network(x)[0]
    network.reset_hidden(BATCH)
    handle = network.rnns[1].register_forward_pre_hook(lambda *_: calls.append(1))
    assert_close_to_largest(network(x)[0], want, RECURRENT)
    assert len(calls) == SEQ
    handle.remove()
    network.rnns[0].register_forward_hook(lambda *_: calls.append(1))
    network(x)
    assert len(calls) == 2 * SEQ


def test_a_parametrized_weight_is_never_stale():
    network, x = build("LSTM"), sequence()
    want = network(x)[0]
    nn.utils.parametrizations.weight_norm(network.rnns[0], "w_hh")
    network.reset_hidden(BATCH)
    assert_close_to_largest(network(x)[0], want, RECURRENT)
    with torch.no_grad():
        network.rnns[0].parametrizations.w_hh.original0.mul_(2)
    network.reset_hidden(BATCH)
    changed = network(x)[0]
    nn.utils.parametrize.remove_parametrizations(network.rnns[0], "w_hh")
    network.reset_hidden(BATCH)
    assert_close_to_largest(changed, network(x)[0], RECURRENT)
    assert not torch.equal(changed, want)


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_pass_after_a_forward_in_eval(name, monkeypatch):
    """CuDNN refuses it unless the forward was told to keep what it needs."""
    kept = []

    def record(function):
        def sequence(*args):
            kept.append(args[6])
            return function(*args)

        return sequence

    layers = [(step, layer._replace(sequence=record(layer.sequence))) for step, layer in LAYERS_OF]
    monkeypatch.setattr(_cell, "_TORCH_LAYERS", layers)
    network = build(name)
    other, x = copy.deepcopy(network).eval(), sequence()
    for module in (network, other):
        module(x)[0].sum().backward()
    both = zip(network.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in both)
    with torch.no_grad():
        network(x)
    assert kept == ([] if name == "mLSTM" else [True] * 4 + [False] * 2)


def test_a_state_set_by_hand():
    """In any memory layout."""
    network, x = build("LSTM"), sequence()
    states = torch.randn(LAYERS, 2, HIDDEN, BATCH).double().transpose(2, 3)
    for cell, pair in zip(network.rnns, states, strict=True):
        cell.hidden = list(pair)
    want = copy.deepcopy(network)
    for cell in want.rnns:
        cell.hidden = [state.contiguous() for state in cell.hidden]
    assert_close(network(x), want(x))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_copies_of_networks_after_a_forward(bidirectional):
    network, x = build("mLSTM", bidirectional=bidirectional), sequence()
    network(x)
    cell = next(module for module in network.modules() if isinstance(module, RNNCell))
    cell.compile(backend="eager")  # copies are not compiled, as those of torch's modules
    copies = copy.deepcopy(network), pickle.loads(pickle.dumps(network))
    del cell._compiled_call_impl
    want = network(x)
    for other in copies:
        assert_equal(other(x), want)
        other.load_state_dict(network.state_dict())


# Dynamo hides this warning of its own, but not where warnings are errors.
hidden_warning = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
COMPILED = [("mLSTM", {}, False), ("Tanh", {"output_size": 2}, False), ("LSTM", {}, True)]


@hidden_warning
@pytest.mark.parametrize(("name", "options", "collect"), COMPILED)
@pytest.mark.slow
def test_compiled_as_one_graph(name, options, collect):
    """Three forwards: without a state, with one, with one that has a history."""
    torch._dynamo.reset()
    network = getattr(RNN, name)(INPUT, HIDDEN, 1, **options).double()
    other = copy.deepcopy(network)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 3, BATCH, INPUT, dtype=torch.float64)
    got, want = ([module(part, collect) for part in x] for module in (compiled, other))
    assert_close(got, want)
    for results in (got, want):
        sum(output.sum() for output, _ in results).backward()
    assert_close(*([p.grad for p in module.parameters()] for module in (network, other)))


@hidden_warning
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
@pytest.mark.slow
def test_compiled_around_torchs_functions(name):
    torch._dynamo.reset()
    network = build(name, bidirectional=True)
    other = copy.deepcopy(network)
    compiled = torch.compile(network, backend="aot_eager")
    for _ in range(2):
        x = sequence()
        got, want = compiled(x), other(x)
        assert_close(got, want)
        for module, result in ((network, got), (other, want)):
            result[0].sum().backward()
            module.detach_hidden()
    assert_close(*([p.grad for p in module.parameters()] for module in (network, other)))


def test_a_forward_of_the_programs_own():
    """Set on a cell by programs that wrap one, or that of a subclass: it is called at each step."""
    network, x = build("LSTM"), sequence()
    want = network(x)[0]
    network.reset_hidden(BATCH)
    cell, calls = network.rnns[0], []
    step = cell.forward
    cell.forward = lambda input: calls.append(1) or step(input)
    assert_close_to_largest(network(x)[0], want, RECURRENT)
    assert len(calls) == SEQ

    class Doubled(RNNCell):
        def forward(self, input):
            return super().forward(2 * input)

    cell = Doubled(3, INPUT, HIDDEN, torch.gru_cell, 1).double()
    plain = RNNCell(3, INPUT, HIDDEN, torch.gru_cell, 1).double()
    plain.load_state_dict(cell.state_dict())
    assert_close_to_largest(stackedRNN(cell)(x)[0], stackedRNN(plain)(2 * x)[0], RECURRENT)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_starts_where_the_forward_did_or_is_refused(reentrant):
    torch.manual_seed(0)
    network = models.mLSTM(3, 4, 2).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)

    def begin_anew(x):
        network.reset_hidden(2)
        return network(x)[0]

    want = torch.autograd.grad(begin_anew(x).square().sum(), [*network.parameters()])
    checkpoint(begin_anew, x, use_reentrant=reentrant).square().sum().backward()
    for parameter, grad in zip(network.parameters(), want, strict=True):
        assert torch.equal(parameter.grad, grad)
    network.reset_hidden(2)
    loss = checkpoint(lambda x: network(x)[0], x, use_reentrant=reentrant).square().sum()
    with pytest.raises(RuntimeError, match="this forward runs inside a backward pass"):
        loss.backward()
