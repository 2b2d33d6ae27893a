"""One step: its derivatives, its parameters, and the life of its state."""

import pytest
import torch
from torch import nn

from apex.RNN.cells import mLSTMRNNCell
from apex.RNN.RNNBackend import RNNCell

BATCH, INPUT, HIDDEN = 3, 4, 5
KINDS = {
    "lstm": (4, torch.lstm_cell, 2),
    "gru": (3, torch.gru_cell, 1),
    "relu": (1, torch.rnn_relu_cell, 1),
    "tanh": (1, torch.rnn_tanh_cell, 1),
}
TORCHS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "relu": lambda *sizes: nn.RNNCell(*sizes, nonlinearity="relu"),
    "tanh": nn.RNNCell,
}


def build(kind, bias=True, output_size=None):
    if kind == "mlstm":
        return mLSTMRNNCell(INPUT, HIDDEN, bias, output_size)
    gates, function, states = KINDS[kind]
    return RNNCell(gates, INPUT, HIDDEN, function, states, bias, output_size)


PROJECTED = [(kind, size) for kind in (*KINDS, "mlstm") for size in (None, 2)]
PROJECTED.remove(("gru", 2))


@pytest.mark.onednn
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_torchs(kind):
    cell, torchs = build(kind).double(), TORCHS[kind](INPUT, HIDDEN).double()
    for own, other in zip(cell.parameters(), torchs.parameters(), strict=True):
        own.data.copy_(other.data)
    x, state = torch.randn(2, BATCH, INPUT, dtype=torch.float64), None
    for step in x:
        state = torchs(step, state)
        want = state if isinstance(state, tuple) else (state,)
        got = cell(step)
        assert isinstance(got, tuple)
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
        assert all(one is other for one, other in zip(got, cell.hidden, strict=True))


def test_a_function_of_the_users_own():
    def leaky(input, hidden, w_ih, w_hh, b_ih=None, b_hh=None):
        return 0.5 * hidden + nn.functional.linear(input, w_ih, b_ih)

    cell = RNNCell(1, INPUT, HIDDEN, leaky, 1, True)
    x = torch.randn(2, BATCH, INPUT)
    first = nn.functional.linear(x[0], cell.w_ih, cell.b_ih)
    assert torch.equal(cell(x[0])[0], first)
    want = 0.5 * first + nn.functional.linear(x[1], cell.w_ih, cell.b_ih)
    assert torch.equal(cell(x[1])[0], want)


def test_a_function_that_gives_another_number_of_states():
    cell = RNNCell(1, INPUT, HIDDEN, lambda input, hidden, *w, **b: hidden[0])  # two by default
    with pytest.raises(ValueError, match=r"returned 1 states .* 2. Pass n_hidden_states=1"):
        cell(torch.randn(BATCH, INPUT))


@pytest.mark.parametrize(("kind", "output_size"), PROJECTED)
def test_new_like(kind, output_size):
    cell = build(kind, True, output_size).to(torch.bfloat16)
    cell(torch.randn(BATCH, INPUT).to(torch.bfloat16))
    for size, width in ((None, INPUT), (7, 7)):
        other = cell.new_like(size)
        assert type(other) is type(cell)
        assert other.input_size == width
        assert other.hidden == [None] * cell.n_hidden_states
        for (name, new), (_, old) in zip(
            other.named_parameters(), cell.named_parameters(), strict=True
        ):
            assert new.dtype == torch.bfloat16
            assert new.shape[:1] == old.shape[:1]
            assert name in ("w_ih", "w_mih") or new.shape == old.shape
            assert new.shape != old.shape or not torch.equal(new, old)


def test_a_state_from_inference_mode_can_be_trained_on():
    cell, x = build("lstm"), torch.randn(BATCH, INPUT)
    with torch.inference_mode():
        cell(x)
    cell(x)[0].sum().backward()
    assert cell.w_hh.grad.any()


@pytest.mark.parametrize(
    ("input", "text"),
    [
        (torch.zeros(2, BATCH, INPUT), r"shape \[2, 3, 4\]; pass \[batch, 4\]"),
        (torch.zeros(BATCH, 9), r"shape \[3, 9\]; pass \[batch, 4\]"),
        (torch.zeros(BATCH, INPUT).half(), r"torch.float16 and the parameters are torch.float32"),
        (None, "the input is a NoneType; pass a tensor"),
    ],
)
@pytest.mark.parametrize("kind", ["lstm", "mlstm"])
def test_inputs_that_do_not_fit(kind, input, text):
    cell = build(kind)
    kept = cell(torch.zeros(BATCH, INPUT))
    with pytest.raises(ValueError, match=text):
        cell(input)
    assert all(one is other for one, other in zip(cell.hidden, kept, strict=True))


@pytest.mark.parametrize("kind", ["lstm", "gru", "relu", "tanh"])
@pytest.mark.parametrize("bias", [True, False])
def test_flatten_parameters_is_torchs(kind, bias, monkeypatch):
    """Cells hand torch's method the very parameters, in a layer of their sizes."""
    seen = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda layer: seen.append(layer))
    cell = build(kind, bias, 2 if kind == "lstm" else None)
    for act in (cell.flatten_parameters, cell.double):
        seen.clear()
        act()
        layer = seen[-1]
        mode = {"relu": "RNN_RELU", "tanh": "RNN_TANH"}.get(kind, kind.upper())
        assert (layer.mode, layer.input_size, layer.hidden_size) == (mode, INPUT, HIDDEN)
        want = [cell.w_ih, cell.w_hh, cell.b_ih, cell.b_hh, cell.w_ho]
        want = [weight for weight in want if weight is not None]
        assert len(layer._flat_weights) == len(want)
        assert all(one is two for one, two in zip(layer._flat_weights, want, strict=True))
